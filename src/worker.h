/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Registration of the background workers.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_WORKER_H
#define OBIX_WORKER_H

extern void obix_register_launcher(void);

extern PGDLLEXPORT void obix_launcher_main(Datum arg);
extern PGDLLEXPORT void obix_worker_main(Datum arg);

#endif							/* OBIX_WORKER_H */
