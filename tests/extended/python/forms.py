"""What the Python clients share: it runs the statements that the test writes to standard input.

Each line is a transaction: `commit` or `rollback`, a statement, and its values as `KIND VALUE`, separated by tabs. The answer is one
line: the id of the message, `error: ...`, or `unsupported` if the client has no such kind of value.
"""

import json
import os
import re
import sys
import uuid

URL = os.environ["DATABASE_URL"]
# The change that the message reports.
ORDER = "insert into orders default values"

KINDS = {"text": str, "integer": int, "uuid": uuid.UUID, "object": json.loads, "null": lambda _: None}


class RolledBack(Exception):
    pass


def serve(version, post, json_types={}):
    """Calls `post(sql, values, finish)` for each line. It has to return `finish(id)` inside its transaction."""
    print(version, flush=True)
    wrappers = {name: lambda text, wrap=wrap: wrap(json.loads(text)) for name, wrap in json_types.items()}
    for line in sys.stdin:
        print(answer(line.rstrip("\n").split("\t"), post, KINDS | wrappers), flush=True)


def answer(fields, post, kinds):
    end, sql, *arguments = fields
    arguments = [argument.partition(" ") for argument in arguments]
    if not all(kind in kinds for kind, _, _ in arguments):
        return "unsupported"

    def finish(message_id):
        if end == "rollback":
            raise RolledBack(message_id)
        return message_id

    try:
        return post(sql, [kinds[kind](value) for kind, _, value in arguments], finish)
    except RolledBack as rolled_back:
        return rolled_back
    except Exception as error:
        return f"error: {error}".splitlines()[0]


def with_markers(sql, marker):
    """The statement with the parameters of the client instead of $1, $2 and so on."""
    return re.sub(r"\$(\d+)", marker, sql)
