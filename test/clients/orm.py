#!/usr/bin/python3
"""
orm.py: a publisher through an ORM, in Python with SQLAlchemy (1.4 or 2.0).

    orm.py < PAYMENTS

It does what publish.py does, by objects: an outbox is a table, and an event is
a row of it.  The application does nothing but add that object to its session.
What the server fills in (sequence, id, recorded_at) is there after the flush.

A plain INSERT draws its sequence at once, and readers stop before it until the
transaction has ended.  Where transactions stay open for long, or the order of
commits matters, call obix.publish instead; publish() below does.
"""
import logging
import random
import sys
import time
from decimal import Decimal

from sqlalchemy import (BigInteger, Column, DateTime, FetchedValue, ForeignKey, Numeric, Text,
                        cast, create_engine, func, select)
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS, UUID
from sqlalchemy.exc import DBAPIError, DataError, IntegrityError
from sqlalchemy.orm import Session, declarative_base

MAX_DELAY = 30.0    # seconds between attempts to connect, at most

Base = declarative_base()


class Account(Base):
    __tablename__ = "account"
    __table_args__ = {"schema": "app"}

    id = Column(BigInteger, primary_key=True)
    balance = Column(Numeric, nullable=False)


class Payment(Base):
    __tablename__ = "payment"
    __table_args__ = {"schema": "app"}

    id = Column(UUID(as_uuid=False), primary_key=True)
    account = Column(BigInteger, ForeignKey(Account.id), nullable=False)
    amount = Column(Numeric, nullable=False)


class OrderEvent(Base):
    """An event in the outbox app.orders."""
    __tablename__ = "orders"
    __table_args__ = {"schema": "app"}
    __mapper_args__ = {"eager_defaults": True}      # ask for id and recorded_at, too

    sequence = Column(BigInteger, primary_key=True, server_default=FetchedValue())
    id = Column(UUID(as_uuid=False), server_default=FetchedValue())
    type = Column(Text)
    key = Column(Text)
    payload = Column(JSONB(none_as_null=False), nullable=False)
    headers = Column(JSONB(none_as_null=True))
    recorded_at = Column(DateTime(timezone=True), server_default=FetchedValue())


def publish(session, outbox, payload, type=None, key=None, headers=None):
    """Publish by obix.publish, in the transaction of a session; returns the id."""
    return session.scalar(select(func.obix.publish(
        cast(outbox, REGCLASS), cast(payload, JSONB), type, key,
        cast(headers, JSONB(none_as_null=True)))))


def pay(session, payment, account, amount, context):
    """Charge a payment to an account, and publish that; once, however often tried."""
    with session.begin():
        if session.get(Payment, payment) is not None:
            return
        charged = session.get(Account, account, with_for_update=True)
        session.add(Payment(id=payment, account=account, amount=amount))
        charged.balance -= amount
        session.add(OrderEvent(type="paid", key=f"account-{account}", headers=context,
                               payload={"payment": payment, "amount": float(amount)}))


def main():
    """Read payments; SQLAlchemy connects again when the connection is lost."""
    engine = create_engine("postgresql+psycopg2://", future=True)
    for line in sys.stdin:
        payment, account, amount, *trace = line.split()
        context = dict(zip(("traceparent", "tracestate"), trace))
        delay = 0.0
        while True:
            try:
                with Session(engine, future=True) as session:
                    pay(session, payment, int(account), Decimal(amount), context)
                break
            except (DataError, IntegrityError) as error:
                logging.warning("payment %s is refused: %s", payment, error.orig)
                break
            except DBAPIError as error:
                if not error.connection_invalidated and error.statement is not None:
                    raise
                delay = min(2 * delay + 0.1, MAX_DELAY)
                logging.warning("payment %s is tried again: %s", payment, error.orig)
                time.sleep(delay * random.uniform(0.5, 1))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        main()
    except DBAPIError as error:
        sys.exit(str(error))
