from tests.s3 import s3, s3_server  # noqa: F401 - fixtures
