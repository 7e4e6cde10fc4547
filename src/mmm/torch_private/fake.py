"""Private names of tensors without elements."""

from __future__ import annotations

# Private: torch._guards, seen in 2.10 to 2.14. No public replacement.
from torch._guards import active_fake_mode as active_fake_mode

# Private: torch._subclasses.fake_tensor, seen in 2.10 to 2.14. No public replacement.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# An operator that needs elements. Its attribute `func` names it.
NEEDS_ELEMENTS = (DataDependentOutputException, DynamicOutputShapeException)
