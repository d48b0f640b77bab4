"""TLS, queues and tools."""

import json
import os

from trial import Failed, curl_many, entry, free_port, make_certificate, program


@entry("OpenSSL s_server", "curl over TLS, 1 connection", "requests/s")
def s_server(trial):
    port, folder = free_port(), trial.folder
    key, certificate = make_certificate(trial)
    (folder / "page").write_bytes(b"x" * 1000)
    server = [program("openssl"), "s_server", "-accept", f"127.0.0.1:{port}", "-WWW", "-quiet"]
    trial.serve([*server, "-key", key, "-cert", certificate], port, cwd=folder)
    return curl_many(trial, f"https://127.0.0.1:{port}/page", 1000, "--insecure")


@entry("mosquitto", "mosquitto_pub, 10,000 messages of QoS 1", "messages/s")
def mosquitto(trial):
    port = free_port()
    configuration = trial.folder / "mosquitto.conf"
    user = "user root\n" if os.geteuid() == 0 else ""
    configuration.write_text(f"{user}listener {port} 127.0.0.1\nallow_anonymous true\n")
    trial.serve([program("mosquitto"), "-c", str(configuration)], port)
    lines = trial.folder / "lines"
    lines.write_text(("x" * 64 + "\n") * 10000)
    with open(lines, "rb") as source:
        _, seconds = trial.client(
            [program("mosquitto_pub"), "-h", "127.0.0.1", "-p", str(port), "-t", "a", "-q", "1", "-l"], stdin=source
        )
    return 10000 / seconds


@entry("iperf3", "iperf3, 1 stream", "Gbit/s")
def iperf3(trial):
    port = free_port()
    trial.serve([program("iperf3"), "-s", "-B", "127.0.0.1", "-p", str(port)], port)
    output, _ = trial.client([program("iperf3"), "-c", "127.0.0.1", "-p", str(port), "-t", "3", "-J"])
    return json.loads(output)["end"]["sum_received"]["bits_per_second"] / 1e9


@entry("socat", "socat, 256 MiB", "MB/s")
def socat(trial):
    port, folder = free_port(), trial.folder
    content = os.urandom(256 << 20)
    (folder / "big").write_bytes(content)
    tool = program("socat")
    trial.serve([tool, "-U", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", f"FILE:{folder}/big"], port)
    _, seconds = trial.client([tool, "-u", f"TCP:127.0.0.1:{port}", f"CREATE:{folder}/copy"])
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("busybox httpd (static)", "curl, 1 connection a request", "requests/s")
def busybox(trial):
    port = free_port()
    (trial.folder / "page.html").write_bytes(b"x" * 1000)
    trial.serve(
        [program("busybox"), "httpd", "-f", "-p", f"127.0.0.1:{port}", "-h", str(trial.folder)], port
    )
    return curl_many(trial, f"http://127.0.0.1:{port}/page.html", 2000)
