/*
 * check.sql
 *	  The demo's self-check: what must hold, and how often it does not.
 */
SELECT 'every record of the package index was listed once, and its event delivered',
	   count(*)
FROM (SELECT r.n
	  FROM demo.record r LEFT JOIN demo.package p USING (n) LEFT JOIN demo.delivered d USING (event)
	  GROUP BY r.n
	  HAVING count(d.event) <> 1) wrong
UNION ALL
SELECT 'every committed event was delivered, with the payload it was published with',
	   count(*)
FROM demo.committed c LEFT JOIN demo.delivered d USING (outbox, event)
WHERE d.payload_hash IS DISTINCT FROM jsonb_hash_extended(c.payload, 0)
UNION ALL
SELECT 'no event was delivered twice',
	   count(*)
FROM (SELECT event
	  FROM demo.delivered d
	  WHERE (outbox, sequence) NOT IN (SELECT outbox, sequence FROM demo.placeholder)
	  GROUP BY event
	  HAVING count(*) > 1) wrong
UNION ALL
SELECT 'nothing was delivered that was not committed',
	   (SELECT count(*) FROM demo.delivered)
	   - (SELECT count(*) FROM demo.placeholder)
	   - (SELECT count(*) FROM demo.delivered JOIN demo.committed USING (outbox, event))
UNION ALL
SELECT 'nothing was delivered of a transaction that rolled back',
	   count(*)
FROM demo.delivered JOIN demo.rolled_back USING (event)
UNION ALL
SELECT 'sequences are delivered from 1 on, in order and without a gap',
	   count(*)
FROM demo.delivered
WHERE place <> sequence
UNION ALL
SELECT 'placeholders stand where INSERTs were rolled back, and nowhere else',
	   count(*)
FROM demo.hole h FULL JOIN demo.placeholder p USING (sequence)
WHERE h.sequence IS NULL OR p.outbox IS DISTINCT FROM 'demo.events'::regclass
UNION ALL
SELECT 'the events of a transaction are neighbours, in the order of its calls',
	   count(*)
FROM demo.job j LEFT JOIN demo.job_range e USING (job)
WHERE e.offsets IS DISTINCT FROM 1 OR e.last - e.first <> j.last - j.first
UNION ALL
SELECT 'a transaction that waited for another has the later sequences',
	   count(*)
FROM (SELECT e.first < lag(e.last) OVER (PARTITION BY l.shelf ORDER BY l.packages) AS is_wrong
	  FROM demo.shelf_log l JOIN demo.job_range e USING (job)) shelf
WHERE is_wrong
UNION ALL
SELECT 'events that had been stranded kept their order',
	   count(*)
FROM demo.delivered d JOIN demo.note n USING (outbox, event)
WHERE d.outbox = 'demo.late'::regclass AND d.sequence <> (n.note ->> 'turn')::bigint
UNION ALL
SELECT 'no event is left in a DEFAULT partition',
	   (SELECT count(*) FROM demo.events WHERE tableoid IN (SELECT partition FROM obix.partition_status WHERE from_sequence IS NULL))
	   + (SELECT count(*) FROM demo.late WHERE tableoid IN (SELECT partition FROM obix.partition_status WHERE from_sequence IS NULL))
UNION ALL
SELECT 'an application that consumed got each package once, and in order',
	   (SELECT count(*) FROM demo.package p FULL JOIN demo.fetched f USING (event) WHERE p.n IS NULL OR f.place IS NULL)
	   + (SELECT count(*) FROM (SELECT sequence <= lag(sequence) OVER (ORDER BY place) AS is_wrong FROM demo.fetched) f WHERE is_wrong)
UNION ALL
SELECT 'what handlers counted equals a query over the records',
	   count(*)
FROM demo.wrong_sections()
UNION ALL
SELECT 'nothing is left for the handlers, and nothing has failed',
	   count(*)
FROM obix.consumer_status
WHERE state <> 'active' OR failed > 0 OR (consumer = 'sections' AND lag_events IS DISTINCT FROM 0)
UNION ALL
SELECT 'readers can read up to the head, and have',
	   count(*)
FROM obix.outbox_status s
WHERE s.high_water_mark <> s.head
	  OR s.head IS DISTINCT FROM (SELECT max(sequence) FROM demo.delivered d WHERE d.outbox = s.outbox);
