/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between the PostgreSQL releases that obix supports.
 *
 * The newest spelling is used everywhere; older servers get it from here.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_COMPAT_H
#define OBIX_COMPAT_H

#include "storage/backendid.h"

#if PG_VERSION_NUM < 150000
#error "obix needs PostgreSQL 15 or later"
#endif

/* PG17: ProcNumber replaces BackendId; both count from 0 here */
#define MyProcNumber	(MyBackendId - 1)

#endif							/* OBIX_COMPAT_H */
