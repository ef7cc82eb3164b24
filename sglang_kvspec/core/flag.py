"""Declaration of one --kvspec flag, and the checks that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag_kinds import Integer, Kind, Number
from sglang_kvspec.core.flag_needs import Need, Server, ServerNeed, Settings, flag_name

Table = Literal["server", "prefix_server", "transfer"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: the source of its parser, checks, refusals and documentation.

    option: field of KVSpecConfig; empty for --kvspec itself. default: value of the field if the
    flag is unset. unset: what a server does then, if the default does not say it; text or a
    number. help: meaning, in Markdown. note: more of it, for docs/reference/flags.md only. hint:
    advice at the end of the refusal of a wrong value. table: table of docs/reference/flags.md that
    lists the flag.
    """

    option: str
    kind: Kind
    default: Any
    help: str
    unset: str | float | None = None
    note: str = ""
    hint: str = ""
    needs: tuple[Need, ...] = ()
    server_needs: tuple[ServerNeed, ...] = ()
    table: Table = "server"

    @property
    def name(self) -> str:
        return flag_name(self.option) if self.option else "--kvspec"

    def allowed(self) -> str:
        """Describe the allowed values in Markdown, with the default first if all are listed."""
        return self.kind.allowed(self.default)

    def default_text(self) -> str:
        """Describe in Markdown what a server uses if the flag is unset."""
        if isinstance(self.unset, str):
            return self.unset
        value = self.default if self.unset is None else self.unset
        is_word = isinstance(value, (str, bool))
        return f"`{str(value).lower()}`" if is_word else text_of(value)

    def help_line(self) -> str:
        """Return the text of --help: meaning, range and default. Choices are in the metavar."""
        has_range = isinstance(self.kind, (Integer, Number))
        limits = f"{self.allowed()}; " if has_range else ""
        text = f"{self.help} ({limits}default: {self.default_text()})"
        # argparse formats help with %, and a terminal shows no Markdown.
        return text.replace("`", "").replace("%", "%%")

    def parse(self, value: Any) -> Any:
        """Convert a value as command lines and YAML files give it. Raises ConfigError."""
        try:
            return self.kind.parse(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refusal(value) from None

    def check_value(self, value: Any) -> None:
        """Raise ConfigError, which names what is allowed, for a wrong value. None is right only as
        the default."""
        if not (value is None and self.default is None) and not self.kind.allows(value):
            raise self._refusal(value)

    def check_needs(self, config: Settings) -> None:
        """Raise ConfigError for the first need on other flags that `config` does not meet."""
        if self._is_set(config):
            for need in self.needs:
                if not need.is_met(config):
                    raise ConfigError(self._sentence(need.sentence, config=config))

    def check_server(self, config: Settings, server: Server, *, on_gpu: bool) -> None:
        """Raise the error of the first need that `server` does not meet.

        on_gpu: check the needs of GPU servers only; otherwise the needs of any server.
        """
        if self._is_set(config):
            for need in self.server_needs:
                if need.only_on_gpu == on_gpu and not need.is_met(config, server):
                    raise need.error(self._sentence(need.sentence, config=config, server=server))

    def _is_set(self, config: Settings) -> bool:
        return bool(getattr(config, self.option) != self.default)

    def _sentence(self, template: str, *, config: Settings, **context: Any) -> str:
        value = text_of(getattr(config, self.option))
        return template.format(flag=self.name, value=value, config=config, **context)

    def _refusal(self, value: object) -> ConfigError:
        return ConfigError(f"{self.name} {self.kind.demand(value)}, got {value!r}{self.hint}")


def text_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
