"""The ModelSpec of each family in models/__init__.py, by name.

It stands apart from spec.py because it imports every family, and families import spec.py.
"""

from pkgutil import resolve_name

from torchtitan.core.registry import Registry
from torchtitan.models import FAMILIES
from torchtitan.models.family import GROUP, Family
from torchtitan.models.spec import ModelSpec


def _spec(family: Family) -> ModelSpec:
    return resolve_name(family.spec)


_specs = {name: _spec(family) for name, family in FAMILIES.items()}
MODELS: Registry[ModelSpec] = Registry(GROUP, _specs, Family, _spec)
