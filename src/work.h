/*-------------------------------------------------------------------------
 *
 * work.h
 *	  Asking for maintenance of outboxes, and who does it.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_WORK_H
#define OBIX_WORK_H

#include "outbox.h"

/* What a worker is asked to do for an outbox: bits of ObixOutbox.work */
#define OBIX_WORK_PREMAKE	0x01	/* partitions fall due */
#define OBIX_WORK_FILL		0x02	/* suspect_from may be moved up */
#define OBIX_WORK_RECOVER	0x04	/* rows went to DEFAULT */
#define OBIX_WORK_NOTIFY	0x08	/* events were committed */

extern void obix_request_work(ObixOutbox *outbox, uint32 work);
extern void obix_request_everything(Oid database);
extern void obix_request_undecided(void);
extern uint32 obix_due_work(ObixOutbox *outbox, TimestampTz now, Oid *database,
							Oid *relation, TimestampTz *retry_at);
extern void obix_take_work(ObixOutbox *outbox, uint32 work);
extern void obix_set_launcher(Latch *latch);
extern void obix_wake_launcher(void);
extern void obix_request_visit(Oid database);
extern void obix_visit_at_exit(void);
extern int	obix_take_visits(Oid *databases);
extern void obix_extension_changed(void);
extern void obix_request_dispatch(ObixOutbox *outbox);
extern void obix_clear_dispatch(void);
extern void obix_wake_dispatcher(Oid database);
extern bool obix_has_idle_dispatcher(Oid database);
extern void obix_set_busy(int place, bool busy);
extern int	obix_worker_room(void);
extern int	obix_reserve_worker(Oid database, ObixWorkerKind kind, bool *first);
extern void obix_set_short_of_workers(bool is_short);
extern bool obix_short_of_workers(void);
extern void obix_set_refused(TimestampTz when);
extern void obix_tell_database_news(void);
extern bool obix_take_database_news(void);
extern void obix_free_worker(int place, ObixWorker *was);
extern void obix_relieve_worker(Oid database);
extern bool obix_is_relieved(int place);
extern void obix_mark_missed(int place);
extern void obix_mark_outdated(int place, uint32 looked_at);
extern bool obix_worker_on_duty(int place);
extern Oid	obix_worker_database(int place);
extern bool obix_enter_worker(int place, Oid database);
extern void obix_leave_worker(int place, bool done);
extern int	obix_worker_pid(Oid database);
extern bool obix_record_failure(ObixOutbox *outbox, ObixTroubleKind kind,
								const char *message, bool busy);
extern bool obix_record_success(ObixOutbox *outbox, ObixTroubleKind kind);
extern Oid	obix_outbox_relid(ObixOutbox *outbox);
extern void obix_get_trouble(ObixOutbox *outbox, ObixTroubleKind kind,
							 ObixTrouble *trouble);

#endif							/* OBIX_WORK_H */
