#!/usr/bin/env node
/*
 * consume.js: a consumer of an outbox, in JavaScript for Node.js with pg.
 *
 *     consume.js CONSUMER             writes a row to app.receipt for each event
 *     consume.js CONSUMER FOLDER      writes a file to a folder for each event
 *
 * It does what consume.py does, in the same way: the row and the acknowledgement
 * are one transaction; a file, which stands for whatever is not in this database,
 * is written before the acknowledgement, under the name of the event's id.
 *
 * SIGTERM and SIGINT end it with status 0, when the batch in hand is done with
 * and acknowledged, or at once while it waits.  Then its session ends when it has
 * waited, or earlier where client_connection_check_interval is set.
 */
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');
const { Client } = require('pg');

const BATCH = 100; // events in a transaction or in one lease, at most
const LEASE = Number(process.env.LEASE ?? 30); // seconds
const MAX_DELAY = 30000; // milliseconds between attempts to connect, at most

let stopping = false;
let idle = false; // nothing is in hand: may be ended at once

function log(...message) {
    console.error(new Date().toISOString(), ...message);
}

/**
 * A trace context (W3C) for what is done about an event: the trace of whoever has
 * published it, and a span of ours.  With OpenTelemetry, propagation.extract()
 * takes the headers as they are.
 */
function childContext(headers) {
    const parent = /^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})/.exec(headers?.traceparent);
    return parent && `00-${parent[2]}-${crypto.randomBytes(8).toString('hex')}-${parent[4]}`;
}

/** Do something that SIGTERM ends at once, with nothing in hand. */
async function atRest(work) {
    if (!stopping) {
        idle = true;
        try {
            await work();
        } finally {
            idle = false;
        }
    }
}

/** Wait until there may be something to do. */
async function wait(client, consumer) {
    await atRest(() => client.query("CALL obix.wait_for($1, '30 s')", [consumer]));
}

async function transaction(client, work) {
    await client.query('BEGIN');
    try {
        await work();
        await client.query('COMMIT');
    } catch (error) {
        await client.query('ROLLBACK').catch(() => {}); // the connection may be gone
        throw error;
    }
}

// Effects in this database, each in the transaction that acknowledges it

/** The next events.  While another fetches, waits until that has committed. */
async function fetch(client, consumer, limit) {
    return (await client.query('SELECT * FROM obix.fetch($1, $2, wait => true)', [consumer, limit])).rows;
}

/**
 * The effect of an event.  A setting has the trace context, for triggers for instance.
 * (To JavaScript, a number in JSON has 15 digits.)
 */
async function apply(client, event) {
    await client.query(
        `INSERT INTO app.receipt (sequence, account, amount)
         SELECT $1, $2, $3 FROM set_config('app.traceparent', $4, true)`,
        [event.sequence, event.key, event.payload.amount, childContext(event.headers)]);
}

/**
 * Say that an event could not be dealt with.  This can be said of what has been
 * fetched, but that was rolled back; so it is fetched again.
 */
async function report(client, consumer, event, error) {
    log(`event ${event.sequence} failed:`, error.message);
    await transaction(client, async () => {
        const [again] = await fetch(client, consumer, 1);
        if (again?.sequence === event.sequence) {
            await client.query('SELECT obix.fail($1, $2, $3)', [consumer, event.sequence, error.message]);
        }
    });
}

/** Deal with events, as long as the connection lasts. */
async function consume(client, consumer) {
    let limit = BATCH;
    while (!stopping) {
        let events = [];
        try {
            await transaction(client, async () => {
                events = await fetch(client, consumer, limit);
                for (const event of events) {
                    await apply(client, event);
                }
                if (events.length > 0) {
                    await client.query('SELECT obix.ack($1, $2)', [consumer, events.at(-1).sequence]);
                }
            });
        } catch (error) {
            if (events.length === 0 || client.lost) {
                throw error; // no event is to blame
            }
            if (events.length === 1) {
                await report(client, consumer, events[0], error);
            }
            limit = 1; // see which of them it is
            continue;
        }
        if (events.length > 0) {
            limit = Math.min(2 * limit, BATCH);
        } else {
            await wait(client, consumer);
        }
    }
}

// Effects elsewhere, each before its acknowledgement, under a lease

/** The effect of an event: idempotent, for it may have been delivered before. */
function deliver(folder, event) {
    const file = path.join(folder, `${event.id}.json`);
    if (!fs.existsSync(file)) {
        fs.writeFileSync(`${file}.new`, `${event.cloudevent}\n`);
        fs.renameSync(`${file}.new`, file);
    }
}

/** Deliver events elsewhere, as long as the connection lasts. */
async function forward(client, consumer, folder) {
    while (!stopping) {
        const { token } = (await client.query(
            'SELECT obix.acquire($1, make_interval(secs => $2)) AS token', [consumer, LEASE])).rows[0];
        if (token === null) { // somebody else is at it
            await atRest(() => sleep(1000));
            continue;
        }
        let renewed = performance.now();
        const events = (await client.query(
            'SELECT sequence, id, obix.cloudevent(e)::text AS cloudevent FROM obix.fetch($1, $2, token => $3) e',
            [consumer, BATCH, token])).rows;
        let done = null;
        let failed = null;
        try {
            for (const event of events) {
                if (performance.now() > renewed + 1000 * LEASE / 3) {
                    await client.query(
                        'SELECT obix.renew($1, $2, make_interval(secs => $3))', [consumer, token, LEASE]);
                    renewed = performance.now();
                }
                try {
                    deliver(folder, event);
                } catch (error) {
                    log(`event ${event.sequence} failed:`, error.message);
                    failed = [consumer, event.sequence, error.message, token];
                    break;
                }
                done = [consumer, event.sequence, token];
            }
            await transaction(client, async () => {
                if (done) {
                    await client.query('SELECT obix.ack($1, $2, $3)', done);
                }
                if (failed) {
                    await client.query('SELECT obix.fail($1, $2, $3, $4)', failed);
                }
                await client.query('SELECT obix.release($1, $2)', [consumer, token]);
            });
        } catch (error) {
            if (error.code !== '55000') {
                throw error;
            }
            // The lease has ended, or a dead letter was let go: what is not
            // acknowledged comes again.
            log(error.message);
            continue;
        }
        if (events.length === 0 || failed) {
            await wait(client, consumer);
        }
    }
}

/** Connect, and connect again when the connection is lost. */
async function main(consumer, folder) {
    let delay = 0;
    while (!stopping) {
        const client = new Client();
        let connected = false;
        // told by events, whether something is asked of it or not
        client.lost = false;
        client.on('error', () => { client.lost = true; });
        client.on('end', () => { client.lost = true; });
        try {
            await atRest(() => client.connect());
            connected = true;
            log('connected');
            delay = 0;
            await (folder === undefined ? consume(client, consumer) : forward(client, consumer, folder));
            await client.end();
        } catch (error) {
            // the message that a session is ended comes before its end
            if (connected && !client.lost && !/^(57P0|08)/.test(error.code)) {
                throw error;
            }
            client.end().catch(() => {});
            delay = Math.min(2 * delay + 100, MAX_DELAY);
            log('no connection:', error.message);
            await atRest(() => sleep(delay * (0.5 + Math.random() / 2)));
        }
    }
}

function stop() {
    stopping = true;
    if (idle) {
        log('stopped');
        process.exit(0);
    }
}

if (process.argv.length < 3 || process.argv.length > 4) {
    console.error('usage: consume.js CONSUMER [FOLDER]');
    process.exit(1);
}
process.on('SIGTERM', stop);
process.on('SIGINT', stop);
main(...process.argv.slice(2)).then(
    () => log('stopped'),
    (error) => {
        log(error.message);
        process.exit(1);
    });
