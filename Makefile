# obix: transactional outbox for PostgreSQL

EXTENSION = obix
MODULE_big = obix
DATA = $(wildcard sql/obix--*.sql)
OBJS = $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))
OBIX_VERSION = $(shell sed -n "s/^default_version = '\(.*\)'$$/\1/p" obix.control)
RELEASE = $(shell sed -n 's/^    "version": "\(.*\)",$$/\1/p' META.json)
PG_CPPFLAGS = -I$(srcdir)/src -DOBIX_VERSION='"$(OBIX_VERSION)"'
PG_CFLAGS = -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers -Wno-cast-function-type

# installcheck wants a server that has test/obix.conf's settings; the TAP tests
# start servers of their own.  A later --outputdir wins, so that both suites
# of pg_regress find expected/.
REGRESS = $(basename $(notdir $(sort $(wildcard test/sql/*.sql))))
REGRESS_OPTS = --inputdir=test --load-extension=obix
ISOLATION = $(basename $(notdir $(sort $(wildcard test/specs/*.spec))))
ISOLATION_OPTS = --inputdir=test --outputdir=. --load-extension=obix
ENCODING = UTF8
NO_LOCALE = 1
TAP_TESTS = 1
PROVE_TESTS = test/t/*.pl
export PGCTLTIMEOUT ?= 180
export PGISOLATIONTIMEOUT ?= 60

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# there is no tracking of who includes what
$(OBJS): $(wildcard src/*.h) obix.control Makefile

# what PGXN takes: the last commit, without what .gitattributes leaves out
.PHONY: dist
dist:
	git archive --format=zip --prefix=obix-$(RELEASE)/ --output=obix-$(RELEASE).zip HEAD
