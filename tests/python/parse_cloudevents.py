"""Reads a webhook of the format cloudevents with the CloudEvents SDK of PyPI.

Standard input is the request as JSON: {"headers": {...}, "body": "..."}. Prints the events as JSON. Fails if the SDK refuses one.
"""

import json
import sys

from cloudevents.core.bindings.http import HTTPMessage, from_http_event


def main():
    request = json.load(sys.stdin)
    headers, body = request["headers"], request["body"]
    if headers["content-type"] == "application/cloudevents-batch+json":
        # The SDK has no batches: their items are events of the structured mode.
        headers = {**headers, "content-type": "application/cloudevents+json"}
        bodies = [json.dumps(item) for item in json.loads(body)]
    else:
        bodies = [body]
    events = [from_http_event(HTTPMessage(headers=headers, body=one.encode())) for one in bodies]
    print(json.dumps([shown(event) for event in events]))


def shown(event):
    return {
        "id": event.get_id(),
        "type": event.get_type(),
        "source": event.get_source(),
        "has_time": event.get_time() is not None,
        "data": event.get_data(),
        "lane": event.get_extension("partitionkey"),
        "seq": event.get_extension("sequence"),
    }


main()
