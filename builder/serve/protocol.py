"""The bodies of requests of OpenAI's HTTP API, checked; fields that it does not know are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MOST_CHOICES = 16
_MOST_SCORES = 20
# Token ids of a prompt; the decoder's capacity is checked later, and far smaller.
_MOST_IDS = 1 << 20

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=_MOST_IDS)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """A null is the default."""
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given


class JsonSchema(_Body):
    """`strict` changes nothing: the answer always follows the schema."""

    name: str = Field(default="", max_length=64)
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(_Body):
    """The format that the text of an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the text must follow; None for any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class Common(_Body):
    """The fields that completions and chats share."""

    model: str = Field(default="", max_length=512)
    n: int = Field(default=1, ge=1, le=_MOST_CHOICES)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(default_factory=dict)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    # Clients send these, and nothing here depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class CompletionRequest(Common):
    """The body of a request to /v1/completions."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1, max_length=256)] | Annotated[
        list[Tokens], Field(min_length=1, max_length=256)
    ]  # fmt: skip
    max_tokens: int = Field(default=16, ge=1, lt=1 << 31)
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_SCORES)
    echo: bool = False
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)


class ToolCall(_Body):
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: dict[Literal["name", "arguments"], str]


class Part(_Body):
    """A text in a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(_Body):
    """An image as a data URL: nothing is fetched. `detail` changes nothing: every image has as many tokens as the model
    takes."""

    url: str = Field(pattern=r"^data:image/[a-z]{2,8};base64,")
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Body):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[Part | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Body):
    """`strict` changes nothing, as for schemas."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class ChatRequest(Common):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=_MOST_SCORES)
    tools: Annotated[list[Tool], Field(max_length=128)] = Field(default_factory=list)
    #: A tool needs its name only.
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools_fit(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        wanted = [self.tool_choice.function.name] if isinstance(self.tool_choice, Tool) else []
        if not set(wanted) <= set(names) or (self.tool_choice == "required" and not names):
            raise ValueError("tool_choice asks for a tool that is not there")
        return self

    @property
    def forced(self) -> list[Function]:
        """The functions of which the answer must call one; none: it may be text."""
        if isinstance(self.tool_choice, Tool):
            return [tool.function for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [tool.function for tool in self.tools if self.tool_choice == "required"]
