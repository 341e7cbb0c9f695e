#!/usr/bin/env bash
#
# consume.sh: a consumer of an outbox, in bash with psql.
#
#     consume.sh CONSUMER                         writes a row to app.receipt for each event
#     consume.sh CONSUMER COMMAND [ARGUMENT]...   runs a command for each event
#
# The row and the acknowledgement are one transaction, so each event has its
# effect exactly once.  The command gets the event as CloudEvent on its standard
# input, and in its environment EVENT_ID and, as tools for OpenTelemetry expect
# it, the W3C trace context of the publisher, TRACEPARENT and TRACESTATE.  It is
# run before the acknowledgement, and perhaps again after a crash: by EVENT_ID it
# should make no difference how often.  If it fails, it is run again later.
#
# SIGTERM and SIGINT end it with status 0, when the batch in hand is done with and
# acknowledged, or at once while it waits.  Killed at any moment, what it had not
# acknowledged is delivered again to whoever comes next.  It ends with status 1
# where a person has to look, for instance because the consumer has stopped.

set -u

batch=100				# events in a transaction or in one lease, at most
lease=${LEASE:-30}		# seconds
max_delay=30			# seconds between attempts to connect, at most

stopping=
waiting=				# what SIGTERM ends at once: a process, and the signal for it
signal=
limit=$batch
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT

log()
{
	echo "$(date +%FT%T) $*" >&2
}

# Run SQL from standard input, with variables NAME=VALUE and out of reach of the
# signals that end this.  Returns what psql does: 2 for want of a connection, 3
# for an error.
sql()
{
	local status

	(
		trap '' TERM INT
		exec psql -XAtq -v ON_ERROR_STOP=1 -F $'\x1f' -v consumer="$consumer" "${@/#/--set=}" 2>"$messages"
	)
	status=$?
	((status == 0)) || log "$(<"$messages")"
	return $status
}

# Wait for what has been started in the background.  SIGTERM ends it with a signal.
rest()
{
	waiting=$!
	signal=$1
	[[ -z $stopping ]] || stop
	wait "$waiting" 2>/dev/null
	waiting=
}

# Go no further than what is in hand.  A psql that is only starting takes no
# SIGINT yet.
stop()
{
	stopping=1
	while [[ -n $waiting ]] && kill -"$signal" "$waiting" 2>/dev/null; do
		sleep 0.1
	done
}

# Wait until there may be something to do.
wait_for()
{
	psql -XAtq -v ON_ERROR_STOP=1 -v consumer="$consumer" <<<"CALL obix.wait_for(:'consumer', '30 s')" 2>/dev/null &
	rest INT
}

# ------------ effects in this database, in the transaction that acknowledges

consume()
{
	local result status events first

	result=$(
		sql limit="$limit" <<-'SQL'
			BEGIN;
			SELECT count(*) AS events, count(*) > 0 AS some, coalesce(min(sequence), 0) AS first,
			    max(sequence) AS last, array_agg(e ORDER BY sequence) AS batch
			FROM obix.fetch(:'consumer', :limit, wait => true) e \gset
			\echo :events :first
			\if :some
			INSERT INTO app.receipt (sequence, account, amount)
			SELECT sequence, key, (payload ->> 'amount')::numeric
			FROM unnest(:'batch'::obix.event[])
			    -- the trace of whoever has published it, and a span of ours
			    CROSS JOIN regexp_replace(substring(headers ->> 'traceparent' FROM '^\w\w-\w{32}-\w{16}-\w\w'),
			        '^..(-.{32}-).{16}', '00\1' || substr(md5(random()::text || sequence), 1, 16)) context
			    CROSS JOIN set_config('app.traceparent', context, true);
			SELECT obix.ack(:'consumer', :last);
			\endif
			COMMIT;
		SQL
	)
	status=$?
	read -r events first <<<"$result"
	if ((status == 0)); then
		limit=$((2 * limit < batch ? 2 * limit : batch))
		((events > 0)) || wait_for
	elif ((status == 3 && ${events:-0} > 0)); then
		status=0
		if ((events == 1)); then
			report "$first" "$(<"$messages")"
			status=$?
		fi
		limit=1					# see which of them it is
	fi
	return $status
}

# Say that an event could not be dealt with.  This can be said of what has been
# fetched, but that was rolled back; so it is fetched again.
report()
{
	sql first="$1" error="$2" >/dev/null <<-'SQL'
		BEGIN;
		SELECT count(*) = 1 AS same FROM obix.fetch(:'consumer', 1, wait => true) WHERE sequence = :first \gset
		\if :same
		SELECT obix.fail(:'consumer', :first, :'error');
		\endif
		COMMIT;
	SQL
}

# ------------- effects elsewhere, before the acknowledgement, under a lease

forward()
{
	local result acquired token sequence id traceparent tracestate event last='' failed='' lost='' renewed=$SECONDS

	result=$(
		sql lease="$lease" limit="$batch" <<-'SQL'
			SELECT token, token IS NOT NULL AS acquired FROM obix.acquire(:'consumer', make_interval(secs => :lease)) token \gset
			\echo :acquired :token
			\if :acquired
			SELECT sequence, id, coalesce(substring(headers ->> 'traceparent' FROM '^\w\w-\w{32}-\w{16}-\w\w'), ''),
			    coalesce(substring(headers ->> 'tracestate' FROM '^[ -~]*'), ''), obix.cloudevent(e)
			FROM obix.fetch(:'consumer', :limit, token => :token) e;
			\endif
		SQL
	) || return
	{
		read -r acquired token
		if [[ $acquired != t ]]; then	# somebody else is at it
			sleep 1 &
			rest TERM
			return 0
		fi
		while IFS=$'\x1f' read -r sequence id traceparent tracestate event; do
			if ((SECONDS > renewed + lease / 3)); then
				sql token="$token" lease="$lease" >/dev/null <<<"SELECT obix.renew(:'consumer', :token, make_interval(secs => :lease))"
				case $? in
					0) renewed=$SECONDS ;;
					3) lost=1 ;;
					*) return 2 ;;
				esac
				[[ -z $lost ]] || break
			fi
			if ! printf '%s\n' "$event" |
				EVENT_ID=$id TRACEPARENT=$traceparent TRACESTATE=$tracestate "${command[@]}"; then
				log "event $sequence failed"
				failed=$sequence
				break
			fi
			last=$sequence
		done
	} <<<"$result"

	if [[ -z $lost ]]; then
		sql token="$token" ${last:+last="$last"} ${failed:+failed="$failed" error="${command[0]} failed"} >/dev/null <<-'SQL'
			BEGIN;
			\if :{?last}
			SELECT obix.ack(:'consumer', :last, :token);
			\endif
			\if :{?failed}
			SELECT obix.fail(:'consumer', :failed, :'error', :token);
			\endif
			SELECT obix.release(:'consumer', :token);
			COMMIT;
		SQL
		case $? in
			0) [[ -n $last && -z $failed ]] || wait_for ;;
			3) ;;				# the lease has ended, or a dead letter was let go:
								# what is not acknowledged comes again
			*) return 2 ;;
		esac
	fi
	return 0
}

# Go on, and try again when there is no connection.
main()
{
	local delay=0

	while [[ -z $stopping ]]; do
		if ((${#command[@]} == 0)); then
			consume
		else
			forward
		fi
		case $? in
			0) delay=0 ;;
			2)
				delay=$((2 * delay + 1 < max_delay ? 2 * delay + 1 : max_delay))
				sleep "$((delay - 1)).$((RANDOM % 10))" &
				rest TERM
				;;
			*) exit 1 ;;
		esac
	done
	log "stopped"
}

if (($# == 0)); then
	echo "usage: consume.sh CONSUMER [COMMAND [ARGUMENT]...]" >&2
	exit 1
fi
consumer=$1
command=("${@:2}")
trap stop TERM INT
main
