"""The compiler of the backend, which nobody calls while TRITON_INTERPRET is set."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return "interpreted"

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    parse_options = add_stages = load_dialects = get_module_map = _refuse
