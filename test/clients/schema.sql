-- What the clients of this folder work with: accounts, the payments that are
-- charged to them, an outbox that tells of each, and two consumers of it.

CREATE EXTENSION IF NOT EXISTS obix;
CREATE SCHEMA IF NOT EXISTS app;
CREATE TABLE app.account (id bigint PRIMARY KEY, balance numeric NOT NULL CHECK (balance >= 0));
CREATE TABLE app.payment (
    id uuid PRIMARY KEY, account bigint NOT NULL REFERENCES app.account, amount numeric NOT NULL);
INSERT INTO app.account SELECT id, 1000000 FROM generate_series(1, 10) id;
SELECT obix.create_outbox('app.orders');

-- receipts are written in this database, with the acknowledgement in one transaction
CREATE TABLE app.receipt (
    sequence bigint PRIMARY KEY, account text NOT NULL, amount numeric NOT NULL,
    traceparent text DEFAULT nullif(current_setting('app.traceparent', true), ''));
SELECT obix.create_consumer('receipts', 'app.orders', types => '{paid}', on_failure => 'dead_letter');

-- messages go elsewhere, as CloudEvents
SELECT obix.create_consumer('messages', 'app.orders', types => '{paid}', on_failure => 'dead_letter');
