"""Creates a subscriber and posts an event, with the package `generated` that openapi-python-client has made of the API description."""

import os

from generated import AuthenticatedClient
from generated.api.hub import create_subscriber, post_event
from generated.models import AcceptedEvent, NewHubEvent, NewSubscriber, SubscriberWithSecret

client = AuthenticatedClient(base_url=os.environ["BASE_URL"], token=os.environ["API_KEY"], raise_on_unexpected_status=True)
new = NewSubscriber(name=os.environ["NAME"], url="http://127.0.0.1:9/", event_types=["order.*"])
subscriber = create_subscriber.sync(client=client, body=new)
assert isinstance(subscriber, SubscriberWithSecret), subscriber
event = post_event.sync(client=client, body=NewHubEvent(event_type="order.paid", payload={"id": 1}))
assert isinstance(event, AcceptedEvent), event
print(event.event_id)
