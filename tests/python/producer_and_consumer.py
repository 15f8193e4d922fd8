"""A service that is not ours, in another language: it posts in its own transaction, and reads from the broker.

Takes what it needs from the environment: POSTGRES_URL, AMQP_URL, QUEUE. Prints the envelope that it received.
"""

import os
import sys

import pika
import psycopg


def post():
    """A reservation and the message about it commit together; one that is rolled back leaves nothing."""
    with psycopg.connect(os.environ["POSTGRES_URL"]) as db:
        db.execute("set role pillarbox_producer")
        try:
            with db.transaction():
                send(db, {"seats": -1})
                raise ValueError("the business says no")
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
            sys.exit("nothing came")
        channel.basic_ack(method.delivery_tag)
        channel.cancel()
        connection.close()
        return properties, body


posted = post()
properties, body = receive()
assert properties.message_id == f"evt_{posted}", (properties.message_id, posted)
assert properties.delivery_mode == 2
print(body.decode())
