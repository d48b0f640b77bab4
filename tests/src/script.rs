//! Common parts of Python programs that communicate through windows.

/// The beginning of a script: the address from the first two arguments, and helpers.
pub const COMMON: &str = r#"
import hashlib, os, socket, struct, sys, threading, time
address = (sys.argv[1], int(sys.argv[2]))
def say(*words):
    # One write: print() writes in several pieces, which those of other threads can separate.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
def listen():
    listener = socket.create_server(address)
    say("listening")
    return listener
def read(connection, size):
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        assert more, "end of stream"
        got += more
    return got
def read_all(connection):
    digest, size = hashlib.sha256(), 0
    while data := connection.recv(65536):
        digest.update(data)
        size += len(data)
    return size, digest.hexdigest()
def outcome(connection):
    try:
        while connection.recv(65536):
            pass
        return "end"
    except ConnectionResetError:
        return "reset"
"#;

/// An echo server.
pub const ECHO: &str = r#"
listener = listen()
def echo(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"#;

/// A client that exchanges a word, then reads until the connection ends and prints how it ended.
pub const CLIENT: &str = r#"
with socket.create_connection(address) as server:
    server.sendall(b"hello")
    assert read(server, 5) == b"hello"
    say("connected")
    say(outcome(server))
"#;

/// [`CLIENT`] that does something else once it is connected.
pub fn client_that(then: &str) -> String {
    CLIENT.replace("say(outcome(server))", then)
}
