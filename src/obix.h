/*-------------------------------------------------------------------------
 *
 * obix.h
 *	  Settings of obix, shared by all its files.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_H
#define OBIX_H

/* GUC variables, defined in obix.c */
extern PGDLLIMPORT int obix_max_outboxes;
extern PGDLLIMPORT int obix_max_consumers;
extern PGDLLIMPORT int obix_dispatch_workers;
extern PGDLLIMPORT int obix_premake_interval;
extern PGDLLIMPORT int obix_lock_timeout;
extern PGDLLIMPORT int obix_worker_linger;
extern PGDLLIMPORT bool obix_auto_recover;
extern PGDLLIMPORT bool obix_notify;
extern PGDLLIMPORT bool obix_force_sync_commit;
extern PGDLLIMPORT bool obix_enabled;

#endif							/* OBIX_H */
