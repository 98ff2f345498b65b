"""The driver of the backend: there, and of no use to what would compile or launch."""

from typing import Any, NoReturn

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = _refuse
    get_benchmarker = _refuse
