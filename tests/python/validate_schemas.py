"""Checks payloads against JSON Schemas with the library jsonschema-rs of PyPI.

Each line of standard input is [schema, [payload, ...]] as JSON. Prints the verdicts of each line as a list of booleans.
"""

import json
import sys

from jsonschema_rs import Draft202012Validator


def main():
    for line in sys.stdin:
        schema, payloads = json.loads(line)
        validator = Draft202012Validator(schema, validate_formats=False)
        print(json.dumps([validator.is_valid(payload) for payload in payloads]))


if __name__ == "__main__":
    main()
