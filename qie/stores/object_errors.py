"""Errors of obstore, in one line and without secrets."""

from __future__ import annotations

import re

from qie.errors import QieError
from qie.stores.contract import StoreError

MAX_CAUSE = 300

NOWHERE = "127.0.0.1:1"
"""The proxy of requests that must not be made. Nobody listens there."""

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for another service; "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login; "
    "GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY; "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}
DENIED = "the store denies access"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_NO_ACCESS = ("PermissionDeniedError", "UnauthenticatedError")
# A store that answers with one of these will answer so again.
_FINAL = ("FileNotFoundError", "AlreadyExistsError", "PreconditionError", "NotSupportedError", "InvalidPathError")
_FINAL_WORDS = (f"{NOWHERE},", "credential", "redirect without LOCATION", "BadScheme", "Invalid range")
# S3, to two who create at once: neither has succeeded yet; and to who completes an upload in parts once more, because
# the first answer was lost: it has to start again.
_PASSING_WORDS = ("ConditionalRequestConflict", "NoSuchUpload")
_PASSING_STATUS = (408, 425, 429)


def passes(error: Exception) -> bool:
    """Whether obstore's error is transient, so that the same request may succeed later."""
    text = str(error)
    if any(words in text for words in _PASSING_WORDS):
        return True
    if (
        isinstance(error, QieError)
        or type(error).__name__ in _FINAL + _NO_ACCESS
        or isinstance(error, (ValueError, TypeError))
    ):
        return False
    if any(words in text for words in _FINAL_WORDS):
        return False
    code = status(error)
    return code is None or code >= 500 or code in _PASSING_STATUS


def status(error: Exception) -> int | None:
    """The HTTP status that an error of obstore speaks of."""
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def no_bucket(error: Exception) -> bool:
    """Whether the bucket is missing, not only the file."""
    return any(words in str(error) for words in _NO_BUCKET)


def store_error(error: Exception, url: str) -> StoreError:
    """A StoreError of one line for any error of obstore."""
    scheme = url.partition("://")[0].lower()
    if no_bucket(error):
        what, hint = "no such bucket", "correct the bucket's name, or create the bucket"
    elif type(error).__name__ in _NO_ACCESS or status(error) in (401, 403) or "credential" in str(error):
        what, hint = DENIED, CREDENTIALS.get(scheme, "ask for a URL that needs no login")
    elif f"{NOWHERE}," in str(error):
        what, hint = (
            "the store redirects to another host, which qie does not follow",
            "set AWS_ENDPOINT_URL to the host itself",
        )
    elif "redirect without LOCATION" in str(error):
        what, hint = "the bucket is in another region", "set AWS_REGION to the region of the bucket"
    else:
        what, hint = "a request to the store failed", "check the URL, or try again later"
    return StoreError(what, where=url, found=cause(error), hint=hint)


def cause(error: Exception) -> str:
    """The cause in one line: the status and the store's message, or the system's."""
    text, _, details = str(error).partition("\n\nDebug source:")
    text = re.sub(r"(https?://)(?:[^\s/@]*@)?([^\s?]*)(\?\S*)?", r"\1\2", text)  # queries and logins may hold keys
    said = re.search(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", text, re.DOTALL)
    text = re.split(r"\s*<", text, maxsplit=1)[0]
    if said:
        text = f"{text} {said[1]}: {said[2]}" if said[2] else f"{text} {said[1]}"
    below = re.search(r'(?:message|error): "([^"]*)"|\b(TimedOut|IncompleteBody|BadScheme)\b', details)
    if below:
        text = f"{text} ({below[1] or below[2]})"
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= MAX_CAUSE else line[: MAX_CAUSE - 1] + "…"
