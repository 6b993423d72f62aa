"""The OpenAPI document: FastAPI's, with the bodies' schemas from the msgspec structs that really decode them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{name}"
_BODIES = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `kind`."""
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI, *, has_keys: bool) -> None:
    """Make `app.openapi` build the document once, when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(_component_schemas())
            if has_keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _component_schemas() -> dict[str, Any]:
    return msgspec.json.schema_components(_BODIES, ref_template=_REF)[1]
