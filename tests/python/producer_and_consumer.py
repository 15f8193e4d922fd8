"""A service in another language: it posts in its own transaction and consumes from the broker.

Reads POSTGRES_URL, AMQP_URL and QUEUE from the environment. Prints the envelope that it received.
"""

import os
import sys

import pika
import psycopg


def post():
    """Commits a reservation together with its message, after a transaction that is rolled back."""
    with psycopg.connect(os.environ["POSTGRES_URL"]) as db:
        db.execute("set role pillarbox_producer")
        try:
            with db.transaction():
                send(db, {"seats": -1})
                raise ValueError("roll back")
        except ValueError:
            pass
        with db.transaction():
            db.execute("insert into reservation (id, seats) values (5, 2)")
            return send(db, {"seats": 2})


def send(db, payload):
    return db.execute(
        """
        select pillarbox.post('RESERVATION_REQUESTED', %s, key => 'restaurant 5',
                              aggregate_type => 'RESTAURANT', aggregate_id => '5')
        """,
        (psycopg.types.json.Json(payload),),
    ).fetchone()[0]


def receive():
    connection = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"]))
    channel = connection.channel()
    for method, properties, body in channel.consume(os.environ["QUEUE"], inactivity_timeout=60):
        if method is None:
            sys.exit("no message arrived within 60 s")
        channel.basic_ack(method.delivery_tag)
        channel.cancel()
        connection.close()
        return properties, body


posted = post()
properties, body = receive()
assert properties.message_id == f"evt_{posted}", (properties.message_id, posted)
assert properties.delivery_mode == 2
print(body.decode())
