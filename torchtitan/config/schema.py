"""The JSON schema of a job, with which an editor completes and checks TOML (`torchtitan check --schema`)."""

import json

from pydantic import TypeAdapter

from torchtitan.config.job import JobConfig


def job_schema() -> str:
    schema = TypeAdapter(JobConfig).json_schema()
    schema |= {"$schema": "http://json-schema.org/draft-07/schema#", "title": "torchtitan job"}
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    help = "Jobs that this one builds on: a file name or a list of them, relative to this file."
    schema["properties"] = {"extends": names | {"description": help}} | schema["properties"]
    schema["$defs"]["Job"]["properties"].pop("config_file")  # of the command line only
    return json.dumps(schema, indent=1).replace("#/$defs/", "#/definitions/").replace('"$defs"', '"definitions"')
