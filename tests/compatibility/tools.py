"""TLS, message queues and network tools."""

import getpass
import json
import os

from trial import (
    Failed,
    curl_many,
    entry,
    free_port,
    last_words,
    make_certificate,
    number,
    program,
    python_with,
)


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


@entry("iperf2", "iperf, 2 streams", "Gbit/s")
def iperf2(trial):
    port = free_port()
    trial.serve([program("iperf"), "-s", "-B", "127.0.0.1", "-p", str(port)], port)
    output, _ = trial.client([program("iperf"), "-c", "127.0.0.1", "-p", str(port), "-t", "3", "-P", "2", "-f", "g"])
    return number(r"\[SUM\].* ([\d.]+) Gbits/sec", output)


@entry("ncat", "ncat, 256 MiB", "MB/s")
def ncat(trial):
    port, folder = free_port(), trial.folder
    content = os.urandom(256 << 20)
    (folder / "big").write_bytes(content)
    tool = program("ncat")
    trial.serve([tool, "--listen", "--keep-open", "--sh-exec", f"cat {folder}/big", "127.0.0.1", str(port)], port)
    with open(folder / "copy", "wb") as copy:
        _, seconds = trial.client([tool, "--recv-only", "127.0.0.1", str(port)], stdout=copy)
    if (folder / "copy").read_bytes() != content:
        raise Failed("the copy differs")
    return len(content) / 1e6 / seconds


@entry("dnsmasq, a process for each connection", "dig over TCP, 1 connection a query", "queries/s")
def dnsmasq(trial):
    port, count = free_port(), 1000
    server = [program("dnsmasq"), "--no-daemon", "--conf-file=/dev/null", "--no-resolv", "--no-hosts"]
    names = ["--bind-interfaces", "--listen-address=127.0.0.1", f"--port={port}", "--address=/example.com/192.0.2.1"]
    trial.serve([*server, *names, "--pid-file=", f"--user={getpass.getuser()}"], port)
    (trial.folder / "names").write_text("a.example.com A\n" * count)
    ask = [program("dig"), "+tcp", "+short", "@127.0.0.1", "-p", str(port), "-f", str(trial.folder / "names")]
    output, seconds = trial.client(ask)
    if output != "192.0.2.1\n" * count:
        raise Failed(f"dig: {len(output.split())} answers to {count} queries, the last: {last_words(output)}")
    return count / seconds


# --- RPC, queues and message passing ----------------------------------------------------------------------------------

GRPC = """
import sys, time, grpc
from concurrent import futures

CALLS = 3000
same = dict(request_deserializer=None, response_serializer=None)
target = '127.0.0.1:' + sys.argv[2]

def one(request, context):
    return request

def many(requests, context):
    for request in requests:
        yield request

if sys.argv[1] == 'server':
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[('grpc.so_reuseport', 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler('Echo', {
        'One': grpc.unary_unary_rpc_method_handler(one, **same),
        'Many': grpc.stream_stream_rpc_method_handler(many, **same),
    })])
    server.add_insecure_port(target)
    server.start()
    server.wait_for_termination()
else:
    with grpc.insecure_channel(target) as channel:
        call, stream = channel.unary_unary('/Echo/One'), channel.stream_stream('/Echo/Many')
        call(b'first', timeout=20, wait_for_ready=True)
        began = time.monotonic()
        for count in range(CALLS):
            request = b'%d ' % count * 25
            assert call(request, timeout=20) == request
        print('calls/s', CALLS / (time.monotonic() - began))
        requests = [bytes([count % 256]) * (count * 997 % 200000) for count in range(500)]
        assert list(stream(iter(requests), timeout=60)) == requests
"""


@entry("gRPC in Python", "grpc, 1 channel, unary calls", "calls/s")
def grpc(trial):
    port, script = free_port(), trial.folder / "echo.py"
    script.write_text(GRPC)
    python = python_with("grpc")
    trial.serve([python, str(script), "server", str(port)], port)
    output, _ = trial.client([python, str(script), "client", str(port)])
    return number(r"calls/s ([\d.]+)", output)


@entry("Erlang distribution", "rpc:call from node to node", "calls/s")
def erlang(trial):
    ports, port = free_port(), free_port()
    trial.serve([program("epmd"), "-port", str(ports), "-address", "127.0.0.1"], ports)
    environment = {"ERL_EPMD_PORT": str(ports), "ERL_CRASH_DUMP": "/dev/null", "HOME": str(trial.folder)}
    node = [program("erl"), "-noinput", "-setcookie", "one", "-kernel", "inet_dist_use_interface", "{127,0,0,1}"]
    listen = ["inet_dist_listen_min", str(port), "inet_dist_listen_max", str(port)]
    trial.serve([*node, *listen, "-name", "a@127.0.0.1"], port, environment=environment)
    script = (
        "A = 'a@127.0.0.1', "
        # The other node listens a moment before its name is known.
        "Ping = fun F() -> case net_adm:ping(A) of pong -> pong; pang -> timer:sleep(100), F() end end, "
        "N = 20000, Body = binary:copy(<<1>>, 1000), Ping(), "
        "{T, _} = timer:tc(fun() -> [Body = rpc:call(A, erlang, hd, [[Body]]) || _ <- lists:seq(1, N)] end), "
        "Big = rand:bytes(3000000), [Big = rpc:call(A, erlang, hd, [[Big]]) || _ <- lists:seq(1, 20)], "
        "io:format(\"calls/s ~p~n\", [N * 1000000 div T]), halt(0)."
    )
    output, _ = trial.client([*node, "-name", "b@127.0.0.1", "-eval", script], environment=environment)
    return number(r"calls/s (\d+)", output)


PIKA = """
import sys, time, pika

COUNT = 3000
# The server listens before it answers.
for attempt in range(50):
    try:
        connection = pika.BlockingConnection(pika.ConnectionParameters('127.0.0.1', int(sys.argv[1])))
        break
    except pika.exceptions.AMQPConnectionError:
        time.sleep(0.2)
channel = connection.channel()
channel.confirm_delivery()
channel.queue_declare('one')
began = time.monotonic()
for count in range(COUNT):
    channel.basic_publish('', 'one', b'%d ' % count * 50)
channel.basic_publish('', 'one', b'x' * 3000000)
for count, (method, _, body) in enumerate(channel.consume('one', inactivity_timeout=20)):
    assert body == (b'%d ' % count * 50 if count < COUNT else b'x' * 3000000), (count, body[:20])
    channel.basic_ack(method.delivery_tag)
    if count == COUNT:
        break
print('messages/s', COUNT / (time.monotonic() - began))
connection.close()
"""


@entry("RabbitMQ", "pika, messages confirmed, read and acknowledged", "messages/s")
def rabbitmq(trial):
    ports, port, folder = free_port(), free_port(), trial.folder
    trial.run_as("rabbitmq")
    trial.serve([program("epmd"), "-port", str(ports), "-address", "127.0.0.1"], ports)
    environment = {
        "ERL_EPMD_PORT": str(ports),
        "HOME": str(folder),
        "RABBITMQ_HOME": str(folder),
        "RABBITMQ_NODENAME": "one@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
    }
    trial.serve([program("rabbitmq-server", "/usr/lib/rabbitmq/bin")], port, environment=environment)
    script = folder / "load.py"
    script.write_text(PIKA)
    output, _ = trial.client([python_with("pika"), str(script), str(port)])
    return number(r"messages/s ([\d.]+)", output)


MPI = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 20000, SHARE = 300000 };

int main(int count, char **arguments) {
    int rank, size, token = 0;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int *out = malloc(SHARE * size * sizeof(int)), *in = malloc(SHARE * size * sizeof(int));
    for (int i = 0; i < SHARE * size; i++) out[i] = rank * 1000003 + i;
    for (int round = 0; round < 10; round++) {
        MPI_Alltoall(out, SHARE, MPI_INT, in, SHARE, MPI_INT, MPI_COMM_WORLD);
        for (int i = 0; i < SHARE * size; i++)
            if (in[i] != i / SHARE * 1000003 + rank * SHARE + i % SHARE) MPI_Abort(MPI_COMM_WORLD, 1);
    }
    double began = MPI_Wtime();
    for (int round = 0; round < ROUNDS; round++) {
        int last = (rank + size - 1) % size, next = (rank + 1) % size;
        if (rank) MPI_Recv(&token, 1, MPI_INT, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        token++;
        MPI_Send(&token, 1, MPI_INT, next, 0, MPI_COMM_WORLD);
        if (!rank) MPI_Recv(&token, 1, MPI_INT, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (!rank) printf("rings/s %f\n", ROUNDS / (MPI_Wtime() - began));
    if (!rank && token != ROUNDS * size) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
    return 0;
}
"""


@entry("Open MPI over its TCP transport", "a token in a ring of two", "rings/s")
def open_mpi(trial):
    folder = trial.folder
    (folder / "ring.c").write_text(MPI)
    trial.prepare([program("mpicc"), "-O2", "-o", str(folder / "ring"), str(folder / "ring.c")])
    choice = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "mpi_yield_when_idle", "1"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    output, _ = trial.client([program("mpirun"), *root, *choice, "--oversubscribe", "-np", "2", str(folder / "ring")])
    return number(r"rings/s ([\d.]+)", output)
