/*-------------------------------------------------------------------------
 *
 * uuid.c
 *	  Identifiers of events: UUIDs of version 7 (RFC 9562).
 *
 * 48 bits of milliseconds, 12 bits of a fraction of one (method 3 of section
 * 6.2), 62 random bits.  Those of one session ascend strictly.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <time.h>

#include "fmgr.h"
#include "port/pg_bswap.h"
#include "utils/timestamp.h"

#include "uuid.h"

#define FRACTION_BITS	12
#define NS_PER_MS		INT64CONST(1000000)

/* Where the time of PostgreSQL begins, by that of UUIDs */
#define EPOCH_MS		((POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * \
						 SECS_PER_DAY * INT64CONST(1000))

PG_FUNCTION_INFO_V1(obix_uuidv7);

/* Random bytes are fetched many at a time: each fetch enters OpenSSL. */
static void
random_bytes(void *to, size_t length)
{
	static unsigned char pool[1024];
	static size_t left = 0;

	if (left < length)
	{
		if (!pg_strong_random(pool, sizeof(pool)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate random values")));
		left = sizeof(pool);
	}
	left -= length;
	memcpy(to, pool + left, length);
	memset(pool + left, 0, length);
}

/* A UUID of these milliseconds and this fraction, palloc'd. */
static pg_uuid_t *
form_uuid(uint64 ticks)
{
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));
	uint64		high;

	high = ticks >> FRACTION_BITS << 16 | UINT64CONST(7) << FRACTION_BITS |
		(ticks & ((1 << FRACTION_BITS) - 1));
	high = pg_hton64(high);
	memcpy(uuid->data, &high, sizeof(high));
	random_bytes(uuid->data + 8, 8);
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;	/* the variant */
	return uuid;
}

/* A new UUID. */
pg_uuid_t *
obix_make_uuid(void)
{
	static uint64 last = 0;
	struct timespec now;
	uint64		ns;
	uint64		ticks;			/* milliseconds and fraction */

	clock_gettime(CLOCK_REALTIME, &now);
	ns = (uint64) now.tv_sec * 1000 * NS_PER_MS + now.tv_nsec;
	ticks = (ns / NS_PER_MS) << FRACTION_BITS |
		((ns % NS_PER_MS) << FRACTION_BITS) / NS_PER_MS;
	if (ticks <= last)
		ticks = last + 1;
	last = ticks;
	return form_uuid(ticks);
}

/*
 * A new UUID for what was recorded at some time; those of one microsecond are in
 * no order.
 */
pg_uuid_t *
obix_make_uuid_at(TimestampTz at)
{
	int64		us = at % 1000;
	int64		ms = at / 1000 + EPOCH_MS;

	if (us < 0)
	{
		us += 1000;
		ms--;
	}
	ms = Min(Max(ms, 0), (INT64CONST(1) << 48) - 1);
	return form_uuid((uint64) ms << FRACTION_BITS |
					 (uint64) (us << FRACTION_BITS) / 1000);
}

/* Is this the UUID of a placeholder? */
bool
obix_uuid_is_nil(const pg_uuid_t *uuid)
{
	static const pg_uuid_t nil;

	return memcmp(uuid, &nil, sizeof(nil)) == 0;
}

Datum
obix_uuidv7(PG_FUNCTION_ARGS)
{
	PG_RETURN_UUID_P(obix_make_uuid());
}
