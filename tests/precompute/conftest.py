from tests.s3 import s3, s3_server  # noqa: F401 - fixtures
from tests.stores.conftest import hub  # noqa: F401 - a fixture
