#!/usr/bin/env node
/*
 * publish.js: a publisher, in JavaScript for Node.js with pg.
 *
 *     publish.js < PAYMENTS
 *
 * It does what publish.py does: each line of its input is a payment with a UUID,
 * an account, an amount and, where there is one, the W3C trace context of the
 * request that it comes from.  A payment and the event that tells of it are one
 * transaction.  Whether a payment is there already, its UUID tells.
 */
'use strict';

const readline = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');
const { Client } = require('pg');

const MAX_DELAY = 30000; // milliseconds between attempts to connect, at most

function log(...message) {
    console.error(new Date().toISOString(), ...message);
}

/** Charge a payment to an account, and publish that; once, however often tried. */
async function pay(client, payment, account, amount, context) {
    await client.query('BEGIN');
    try {
        const inserted = await client.query(
            'INSERT INTO app.payment (id, account, amount) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING',
            [payment, account, amount]);
        if (inserted.rowCount > 0) {
            await client.query('UPDATE app.account SET balance = balance - $1 WHERE id = $2', [amount, account]);
            await client.query(
                `SELECT obix.publish('app.orders',
                     jsonb_build_object('payment', $1::uuid, 'amount', $2::numeric),
                     type => 'paid', key => $3, headers => $4)`,
                [payment, amount, `account-${account}`, context]);
        }
        await client.query('COMMIT');
    } catch (error) {
        await client.query('ROLLBACK').catch(() => {}); // the connection may be gone
        throw error;
    }
}

async function connect() {
    const client = new Client();
    client.on('error', () => { client.lost = true; }); // while nothing is asked of it
    await client.connect();
    return client;
}

async function main() {
    let client = null;
    for await (const line of readline.createInterface({ input: process.stdin })) {
        const [payment, account, amount, traceparent, tracestate] = line.trim().split(/\s+/);
        for (let delay = 100; ; delay = Math.min(2 * delay, MAX_DELAY)) {
            try {
                if (client === null || client.lost) {
                    client = null;
                    client = await connect();
                }
                await pay(client, payment, account, amount, { traceparent, tracestate });
                break;
            } catch (error) {
                if (/^2[23]/.test(error.code)) { // bad data, or a constraint
                    log(`payment ${payment} is refused:`, error.message);
                    break;
                }
                log(`payment ${payment} is tried again:`, error.message);
                if (client !== null) {
                    client.end().catch(() => {});
                    client = null;
                }
                await sleep(delay * (0.5 + Math.random() / 2));
            }
        }
    }
    if (client !== null) {
        await client.end();
    }
}

main().catch((error) => {
    log(error.message);
    process.exit(1);
});
