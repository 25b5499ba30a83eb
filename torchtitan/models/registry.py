"""What builds each family of models/__init__.py, by its name."""

from pkgutil import resolve_name

from torchtitan.models import FAMILIES
from torchtitan.models.family import GROUP, Family
from torchtitan.models.spec import ModelSpec
from torchtitan.registration import Registry


def _spec(family: Family) -> ModelSpec:
    return resolve_name(family.spec)


_specs = {name: _spec(family) for name, family in FAMILIES.items()}
MODELS: Registry[ModelSpec] = Registry(GROUP, _specs, Family, _spec)
