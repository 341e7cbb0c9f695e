/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  The background workers.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_WORKER_H
#define OBIX_WORKER_H

#include "datatype/timestamp.h"

extern int	obix_worker_place;

extern void obix_set_own_values(void);
extern void obix_begin_worker(Datum arg);
extern bool obix_worker_interrupts(void);
extern void obix_leave_if_outdated(void);
extern bool obix_worker_makes_way(void);
extern void obix_worker_sleep(long ms, int events);
extern void obix_end_worker(void);

extern void obix_register_launcher(void);

extern PGDLLEXPORT void obix_launcher_main(Datum arg);
extern PGDLLEXPORT void obix_worker_main(Datum arg);
extern PGDLLEXPORT void obix_dispatcher_main(Datum arg);

#endif							/* OBIX_WORKER_H */
