"""Whether an engine's server is ready: it says so, and it lists the model that it was told."""

import httpx

PROBE_TIMEOUT_S = 10.0


class ServerProbe:
    """`url` is `http://...` or `unix:///path`; `key` is sent where there is one."""

    def __init__(self, url: str, model_id: str, key: str | None = None) -> None:
        path = url.removeprefix("unix://")
        is_unix = path != url
        self._model_id = model_id
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        self._client = httpx.AsyncClient(
            base_url="http://localhost" if is_unix else url,
            transport=httpx.AsyncHTTPTransport(uds=path if is_unix else None),
            timeout=PROBE_TIMEOUT_S,
            headers=headers,
        )

    async def problem(self) -> str | None:
        """What is amiss, in words; None when it is ready."""
        try:
            health = await self._client.get("/health")
            if health.status_code != 200:
                return f"/health answers {health.status_code}"
            models = await self._client.get("/v1/models")
            if models.status_code != 200:
                return f"/v1/models answers {models.status_code}"
            listed = [str(each["id"]) for each in models.json()["data"]]
        except httpx.TimeoutException:
            return "it does not answer in time"
        except httpx.TransportError:
            return "nothing listens yet"
        except (KeyError, TypeError, ValueError):
            return "/v1/models answers with something else than a list of models"
        if self._model_id not in listed:
            return f"it serves {', '.join(listed) or 'nothing'}, not {self._model_id}"
        return None

    async def close(self) -> None:
        await self._client.aclose()
