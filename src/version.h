/*-------------------------------------------------------------------------
 *
 * version.h
 *	  The version of the library, and that of the extension in a database.
 *
 * OBIX_VERSION comes from the Makefile, which has it from obix.control.
 *
 * Copyright (c) 2026, the obix authors
 *
 *-------------------------------------------------------------------------
 */
#ifndef OBIX_VERSION_H
#define OBIX_VERSION_H

extern char *obix_extension_version(void);
extern bool obix_is_before_library(const char *version);

#endif							/* OBIX_VERSION_H */
