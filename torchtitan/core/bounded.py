"""Numbers with bounds, for dataclasses whose values come from another process or machine as JSON."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
ExitCode = Annotated[int, Field(ge=0, le=255)]
