#!/usr/bin/env bash
#
# publish.sh: a publisher, in bash with psql.
#
#     publish.sh < PAYMENTS
#
# It does what publish.py does: each line of its input is a payment with a UUID,
# an account, an amount and, where there is one, the W3C trace context of the
# request that it comes from.  A payment and the event that tells of it are one
# transaction, here one statement.  Whether a payment is there already, its UUID
# tells.

set -u

log()
{
	echo "$(date +%FT%T)" "$@" >&2
}

# Charge a payment to an account, and publish that; once, however often tried.
pay()
{
	psql -XAtq -v ON_ERROR_STOP=1 -v payment="$1" -v account="$2" -v amount="$3" \
		-v traceparent="${4:-}" -v tracestate="${5:-}" 2>&1 >/dev/null <<-'SQL'
			WITH new AS (
			    INSERT INTO app.payment (id, account, amount) VALUES (:'payment', :'account', :'amount')
			    ON CONFLICT DO NOTHING
			    RETURNING *),
			charged AS (
			    UPDATE app.account SET balance = balance - new.amount FROM new WHERE account.id = new.account)
			SELECT obix.publish('app.orders', jsonb_build_object('payment', id, 'amount', amount),
			    type => 'paid', key => 'account-' || account,
			    headers => jsonb_strip_nulls(jsonb_build_object(
			        'traceparent', nullif(:'traceparent', ''), 'tracestate', nullif(:'tracestate', ''))))
			FROM new;
		SQL
}

while read -r payment account amount traceparent tracestate; do
	for ((delay = 1; ; delay = delay < 16 ? 2 * delay : 30)); do
		message=$(pay "$payment" "$account" "$amount" "$traceparent" "$tracestate") && break
		status=$?
		if ((status == 3)); then
			log "payment $payment is refused: $message"
			break
		fi
		((status == 2)) || exit 1	# not for want of a connection
		log "payment $payment is tried again: $message"
		sleep "0.$((RANDOM % 10))"
		sleep $((delay - 1))
	done
done
