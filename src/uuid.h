/*-------------------------------------------------------------------------
 *
 * uuid.h
 *	  Identifiers of events.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_UUID_H
#define OBIX_UUID_H

#include "datatype/timestamp.h"
#include "utils/uuid.h"

extern pg_uuid_t *obix_make_uuid(void);
extern pg_uuid_t *obix_make_uuid_at(TimestampTz at);
extern bool obix_uuid_is_nil(const pg_uuid_t *uuid);

#endif							/* OBIX_UUID_H */
