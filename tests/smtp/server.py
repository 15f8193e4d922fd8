"""A mail server for tests.

    server.py FOLDER [--port PORT] [--starttls|--tls CERTIFICATE KEY] [--login USER PASSWORD] [--smtputf8]

It writes its port to FOLDER/port, and every e-mail that arrives completely to FOLDER/mails/, as JSON. Before each reply it
reads FOLDER/rules.json, which tells it to misbehave:

    {"mail": "550 no", "rcpt": {"ada@example.org": "550 no such user"}, "data": "451 later", "delay": 0.5, "die": true}

`mail` is the reply to every sender; `rcpt` has replies to recipients; `data` is the reply to every e-mail, which is recorded
all the same; `delay` is the time in seconds before that reply; with `die` the process ends instead of replying.
"""

import argparse
import asyncio
import email
import email.policy
import itertools
import json
import os
import ssl
import sys

from aiosmtpd.smtp import SMTP, AuthResult


class Handler:
    def __init__(self, folder):
        self.folder = folder
        self.numbers = itertools.count()

    def rules(self):
        try:
            with open(os.path.join(self.folder, "rules.json")) as file:
                return json.load(file)
        except FileNotFoundError:
            return {}

    async def handle_MAIL(self, server, session, envelope, address, options):
        reply = self.rules().get("mail")
        if reply:
            return reply
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 OK"

    async def handle_RCPT(self, server, session, envelope, address, options):
        reply = self.rules().get("rcpt", {}).get(address)
        if reply:
            return reply
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):
        self.write(server, session, envelope)
        rules = self.rules()
        if rules.get("die"):
            os._exit(1)
        await asyncio.sleep(rules.get("delay", 0))
        # The length of the file is the number of replies.
        with open(os.path.join(self.folder, "replies"), "a") as file:
            file.write(".")
        return rules.get("data", "250 queued")

    def write(self, server, session, envelope):
        parsed = email.message_from_bytes(envelope.content, policy=email.policy.default)
        part = lambda kind: parsed.get_body((kind,)).get_content()
        mail = {
            "from": envelope.mail_from,
            "to": envelope.rcpt_tos,
            "options": envelope.mail_options,
            "headers": [[name, str(value)] for name, value in parsed.items()],
            "text": part("plain"),
            "html": part("html"),
            "is_encrypted": server.transport.get_extra_info("ssl_object") is not None,
            "has_login": bool(session.authenticated),
        }
        name = f"{os.getpid()}-{next(self.numbers):06}.json"
        temporary = os.path.join(self.folder, name)
        with open(temporary, "w") as file:
            json.dump(mail, file)
        os.rename(temporary, os.path.join(self.folder, "mails", name))


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--starttls", nargs=2)
    parser.add_argument("--tls", nargs=2)
    parser.add_argument("--login", nargs=2)
    parser.add_argument("--smtputf8", action="store_true")
    options = parser.parse_args()
    os.makedirs(os.path.join(options.folder, "mails"), exist_ok=True)
    handler = Handler(options.folder)

    def context(files):
        if not files:
            return None
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*files)
        return tls

    starttls = context(options.starttls)

    def check_login(server, session, envelope, mechanism, data):
        is_valid = [data.login.decode(), data.password.decode()] == options.login
        return AuthResult(success=is_valid, handled=False)

    def connect():
        return SMTP(
            handler,
            enable_SMTPUTF8=options.smtputf8,
            hostname="localhost",
            tls_context=starttls,
            authenticator=check_login if options.login else None,
            auth_required=bool(options.login),
            auth_require_tls=False,
            command_call_limit={"*": 1000000},
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_server(connect, "127.0.0.1", options.port, ssl=context(options.tls))
    temporary = os.path.join(options.folder, "port.new")
    with open(temporary, "w") as file:
        file.write(str(server.sockets[0].getsockname()[1]))
    os.rename(temporary, os.path.join(options.folder, "port"))
    # The test ends this process. If the test itself was killed, standard input ends.
    loop.add_reader(sys.stdin, lambda: os._exit(0))
    await server.serve_forever()


asyncio.run(main())
