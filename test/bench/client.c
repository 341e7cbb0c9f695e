/*-------------------------------------------------------------------------
 *
 * client.c
 *	  The client whose time the benchmarks measure.
 *
 * A program on libpq, so that its own part is small and the same for all
 * that is compared.  Results are fetched as text, and each value is looked
 * at once, as COPY's data is.  The connection is what the environment says.
 *
 *	client copy STATEMENT
 *		runs a COPY TO STDOUT; prints "rows bytes seconds end"
 *
 *	client pages [OPTION]... STATEMENT...
 *		runs the statements in one pipeline, again and again, and prints the
 *		same.  The last of them returns a page; its first column is the
 *		position, the third the type.  $1 is the last position of the page
 *		before, $2 an array of all its positions.  Ends at an empty page.
 *		  -b STATEMENT	run before; counts for the time, as does -e
 *		  -e STATEMENT	run afterwards
 *		  -s N			leave the first N statements out of the first turn
 *		  -a POSITION	what $1 is in the first turn
 *		  -n ROWS		go on when a page is empty, until there were so many
 *		  -x			go on, until there was an event of type "stop"
 *		  -l CHANNEL	wait for a notification before each turn
 *		  -t N			do all that in N sessions; prints for the last to end
 *
 *	client wake [OPTION]... PUBLISH STATEMENT...
 *		does the same in a second session, and lets the first publish probes,
 *		one at a time; $1 of PUBLISH is the number of the probe, which has to
 *		arrive as the key of an event of type "probe", in the fourth column.
 *		Prints for each the microseconds from the end of PUBLISH until it is
 *		in hand, or "lost" after a second.
 *		  -n PROBES
 *		  -h STATEMENT	run before each PUBLISH, in a session of its own ...
 *		  -r STATEMENT	... and this after it: its end is what counts
 *		  -a, -l		as above
 *
 * "end" is CLOCK_MONOTONIC.  When the first two are about to begin, they say
 * "ready" on the standard error.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <libpq-fe.h>

#define MAX_STATEMENTS	8
#define MAX_PROBES		100000
#define POSITION_LENGTH	24
#define LOST_AFTER		1.0		/* seconds */
#define PAUSE			1000	/* microseconds between probes, for the waiter
								 * to wait again */

/* what to do, from the command line */
static const char *statements[MAX_STATEMENTS];
static int	statement_count;
static const char *before[MAX_STATEMENTS];
static int	before_count;
static const char *after[MAX_STATEMENTS];
static int	after_count;
static int	skipped;
static const char *start = "0";
static long wanted;
static bool until_stop;
static const char *channel;
static int	sessions = 1;
static const char *hold;
static const char *release;
static bool wants_array;

/* when probes arrived, 0: not yet; and whom to tell */
static _Atomic double arrived[MAX_PROBES];

/* What a session has read. */
typedef struct Reader
{
	PGconn	   *conn;
	char		position[POSITION_LENGTH];
	char	   *array;			/* of the positions of the last page */
	size_t		array_size;
	bool		stopped;		/* the event of type "stop" was there */
	long		rows;
	size_t		bytes;
	unsigned	sum;			/* so that values are looked at */
	double		seconds;
	double		end;
} Reader;

static double
now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double) t.tv_sec + (double) t.tv_nsec / 1e9;
}

static void
fail(PGconn *conn, const char *what)
{
	fprintf(stderr, "client: %s: %s", what, PQerrorMessage(conn));
	exit(1);
}

static PGconn *
connect_to(void)
{
	PGconn	   *conn = PQconnectdb("");

	if (PQstatus(conn) != CONNECTION_OK)
		fail(conn, "connect");
	return conn;
}

static void
check(PGconn *conn, PGresult *result, const char *what)
{
	ExecStatusType status = PQresultStatus(result);

	if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
	{
		fprintf(stderr, "client: %s\n", PQresultErrorMessage(result));
		fail(conn, what);
	}
}

static void
run(PGconn *conn, const char *statement)
{
	PGresult   *result = PQexec(conn, statement);

	check(conn, result, statement);
	PQclear(result);
}

static int
parameters_of(const char *statement)
{
	return strstr(statement, "$2") ? 2 : strstr(statement, "$1") ? 1 : 0;
}

static void
name_of(int n, char *name)
{
	sprintf(name, "s%d", n);
}

static void
begin_reader(Reader *reader)
{
	char		name[16];

	memset(reader, 0, sizeof(*reader));
	reader->conn = connect_to();
	snprintf(reader->position, sizeof(reader->position), "%s", start);
	for (int i = 0; i < statement_count; i++)
	{
		PGresult   *result;

		name_of(i, name);
		result = PQprepare(reader->conn, name, statements[i], 0, NULL);
		check(reader->conn, result, statements[i]);
		PQclear(result);
	}
	if (channel)
	{
		char		listen[100];

		snprintf(listen, sizeof(listen), "LISTEN %s", channel);
		run(reader->conn, listen);
	}
}

/* Note the arrival of probes. */
static void
look_for_probes(PGresult *page, double time)
{
	for (int i = 0; i < PQntuples(page); i++)
	{
		int			probe;

		if (strcmp(PQgetvalue(page, i, 2), "probe") != 0)
			continue;
		probe = atoi(PQgetvalue(page, i, 3));
		if (probe >= 0 && probe < MAX_PROBES && arrived[probe] == 0)
			arrived[probe] = time;
	}
}

/* Look at each value of a page; remember the positions. */
static void
look_at(Reader *reader, PGresult *page)
{
	int			rows = PQntuples(page);
	int			columns = PQnfields(page);
	size_t		used = 1;

	for (int i = 0; i < rows; i++)
	{
		for (int j = 0; j < columns; j++)
		{
			reader->bytes += PQgetlength(page, i, j);
			reader->sum += (unsigned char) *PQgetvalue(page, i, j);
		}
		if (until_stop && strcmp(PQgetvalue(page, i, 2), "stop") == 0)
			reader->stopped = true;
	}
	reader->rows += rows;
	if (rows > 0)
		snprintf(reader->position, sizeof(reader->position), "%s", PQgetvalue(page, rows - 1, 0));

	if (!wants_array)
		return;
	if (reader->array_size < (size_t) rows * POSITION_LENGTH + 3)
	{
		reader->array_size = (size_t) rows * POSITION_LENGTH + 3;
		reader->array = realloc(reader->array, reader->array_size);
	}
	reader->array[0] = '{';
	for (int i = 0; i < rows; i++)
		used += sprintf(reader->array + used, i ? ",%s" : "%s", PQgetvalue(page, i, 0));
	strcpy(reader->array + used, "}");
}

/* Run the statements from the first on, in one pipeline; returns the page. */
static PGresult *
turn(Reader *reader, int first)
{
	PGconn	   *conn = reader->conn;
	PGresult   *page = NULL;
	PGresult   *result;

	if (PQenterPipelineMode(conn) != 1)
		fail(conn, "pipeline");
	for (int i = first; i < statement_count; i++)
	{
		const char *values[2] = {reader->position, reader->array};
		char		name[16];

		name_of(i, name);
		if (PQsendQueryPrepared(conn, name, parameters_of(statements[i]), values, NULL, NULL, 0) != 1)
			fail(conn, "send");
	}
	if (PQpipelineSync(conn) != 1)
		fail(conn, "sync");
	for (int i = first; i < statement_count; i++)
	{
		while ((result = PQgetResult(conn)) != NULL)
		{
			check(conn, result, statements[i]);
			PQclear(page);
			page = result;
		}
	}
	result = PQgetResult(conn);
	if (PQresultStatus(result) != PGRES_PIPELINE_SYNC || PQexitPipelineMode(conn) != 1)
		fail(conn, "end of pipeline");
	PQclear(result);
	return page;
}

static void
await_notification(PGconn *conn)
{
	bool		notified = false;

	while (!notified)
	{
		PGnotify   *notification;
		struct pollfd fd = {.fd = PQsocket(conn),.events = POLLIN};

		while ((notification = PQnotifies(conn)) != NULL)
		{
			notified = true;
			PQfreemem(notification);
		}
		if (notified)
			break;
		poll(&fd, 1, -1);
		if (PQconsumeInput(conn) != 1)
			fail(conn, "notification");
	}
}

/* Is there anything more to read? */
static bool
goes_on(Reader *reader, int rows)
{
	if (until_stop)
		return !reader->stopped;
	if (wanted > 0)
		return reader->rows < wanted;
	return rows > 0;
}

static void *
read_pages(void *arg)
{
	Reader	   *reader = arg;
	double		began = now();
	int			first = skipped;
	int			rows;

	for (int i = 0; i < before_count; i++)
		run(reader->conn, before[i]);
	do
	{
		PGresult   *page;

		if (channel)
			await_notification(reader->conn);
		page = turn(reader, first);
		rows = PQntuples(page);
		look_at(reader, page);
		PQclear(page);
		first = 0;
	} while (goes_on(reader, rows));
	for (int i = 0; i < after_count; i++)
		run(reader->conn, after[i]);
	reader->end = now();
	reader->seconds = reader->end - began;
	PQfinish(reader->conn);
	return NULL;
}

static void
report(Reader *reader)
{
	printf("%ld %zu %.6f %.6f\n", reader->rows, reader->bytes, reader->seconds, reader->end);
	if (reader->sum == 1)
		fputs("", stderr);
}

static void
pages(void)
{
	Reader	   *readers = calloc(sessions, sizeof(Reader));
	pthread_t  *threads = calloc(sessions, sizeof(pthread_t));
	Reader	   *last = readers;

	for (int i = 0; i < sessions; i++)
		begin_reader(&readers[i]);
	fputs("ready\n", stderr);
	for (int i = 0; i < sessions; i++)
		pthread_create(&threads[i], NULL, read_pages, &readers[i]);
	for (int i = 0; i < sessions; i++)
	{
		pthread_join(threads[i], NULL);
		if (readers[i].end > last->end)
			last = &readers[i];
	}
	report(last);
}

static void
copy(void)
{
	Reader		reader;
	PGresult   *result;
	char	   *data;
	int			length;
	double		began;

	memset(&reader, 0, sizeof(reader));
	reader.conn = connect_to();
	fputs("ready\n", stderr);
	began = now();
	result = PQexec(reader.conn, statements[0]);
	if (PQresultStatus(result) != PGRES_COPY_OUT)
		fail(reader.conn, "copy");
	PQclear(result);
	while ((length = PQgetCopyData(reader.conn, &data, 0)) > 0)
	{
		reader.rows++;
		reader.bytes += length;
		reader.sum += (unsigned char) data[0];
		PQfreemem(data);
	}
	if (length != -1)
		fail(reader.conn, "copy");
	reader.end = now();
	reader.seconds = reader.end - began;
	report(&reader);
}

static void *
wait_for_probes(void *arg)
{
	Reader	   *reader = arg;

	for (;;)
	{
		PGresult   *page;

		if (channel)
			await_notification(reader->conn);
		page = turn(reader, 0);
		look_for_probes(page, now());
		look_at(reader, page);
		PQclear(page);
	}
	return NULL;
}

static void
wake(void)
{
	const char *publish = statements[0];
	Reader		reader;
	PGconn	   *publisher = connect_to();
	PGconn	   *holder = hold ? connect_to() : NULL;
	PGresult   *result;
	pthread_t	thread;

	statement_count--;
	memmove(statements, statements + 1, statement_count * sizeof(statements[0]));
	begin_reader(&reader);
	result = PQprepare(publisher, "publish", publish, 0, NULL);
	check(publisher, result, publish);
	PQclear(result);
	pthread_create(&thread, NULL, wait_for_probes, &reader);

	for (int i = 0; i < wanted && i < MAX_PROBES; i++)
	{
		char		probe[16];
		const char *values[1] = {probe};
		double		ended;

		usleep(PAUSE);
		sprintf(probe, "%d", i);
		if (holder)
			run(holder, hold);
		result = PQexecPrepared(publisher, "publish", 1, values, NULL, NULL, 0);
		ended = now();
		check(publisher, result, publish);
		PQclear(result);
		if (holder)
		{
			run(holder, release);
			ended = now();
		}
		while (arrived[i] == 0 && now() < ended + LOST_AFTER)
			usleep(100);
		if (arrived[i] == 0)
			puts("lost");
		else
			printf("%.1f\n", (arrived[i] - ended) * 1e6);
	}
	fflush(stdout);
	_exit(0);					/* the other session waits */
}

int
main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	int			option;

	optind = 2;
	while ((option = getopt(argc, argv, "+b:e:s:a:n:xl:t:h:r:")) != -1)
	{
		switch (option)
		{
			case 'b':
				before[before_count++ % MAX_STATEMENTS] = optarg;
				break;
			case 'e':
				after[after_count++ % MAX_STATEMENTS] = optarg;
				break;
			case 's':
				skipped = atoi(optarg);
				break;
			case 'a':
				start = optarg;
				break;
			case 'n':
				wanted = atol(optarg);
				break;
			case 'x':
				until_stop = true;
				break;
			case 'l':
				channel = optarg;
				break;
			case 't':
				sessions = atoi(optarg);
				break;
			case 'h':
				hold = optarg;
				break;
			case 'r':
				release = optarg;
				break;
			default:
				return 2;
		}
	}
	for (; optind < argc && statement_count < MAX_STATEMENTS; optind++)
	{
		wants_array |= parameters_of(argv[optind]) > 1;
		statements[statement_count++] = argv[optind];
	}
	if (strcmp(mode, "copy") == 0 && statement_count == 1)
		copy();
	else if (strcmp(mode, "pages") == 0 && statement_count > 0)
		pages();
	else if (strcmp(mode, "wake") == 0 && statement_count > 1)
		wake();
	else
	{
		fprintf(stderr, "client: cannot do \"%s\" with %d statements\n", mode, statement_count);
		return 2;
	}
	return 0;
}
