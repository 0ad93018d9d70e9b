"""Fixtures: a bucket of moto's S3 server for a whole module, and files in it."""

import io
from collections.abc import Iterator
from typing import Any

import boto3
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an empty bucket called `bucket`. The environment is that of the nodes, too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        yield client
    S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module")
def urls(s3: Any, gsm8k: str) -> list[str]:
    """Two files of 1,000 and 30 rows, in row groups of 100."""
    table = pq.read_table(gsm8k)
    for name, rows in (("a", table.slice(0, 1000)), ("b", table.slice(1000, 30))):
        content = io.BytesIO()
        pq.write_table(rows, content, row_group_size=100)
        s3.put_object(Bucket="bucket", Key=f"data/{name}.parquet", Body=content.getvalue())
    return ["s3://bucket/data/a.parquet", "s3://bucket/data/b.parquet"]
