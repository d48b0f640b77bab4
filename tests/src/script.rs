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

/// Conversations that fork meanwhile, so that their bytes go back to TCP now and then. A connection may be reset, but
/// must neither end early nor lose a byte.
pub const FORKING_TALKS: &str = r#"
import random
def talk(number):
    choices, turns, resets = random.Random(number), 0, 0
    while not os.path.exists("over"):
        try:
            with socket.create_connection(address) as server:
                while not os.path.exists("over"):
                    piece = choices.randbytes(choices.choice([1, 100, 5000, 50_000]))
                    server.sendall(piece)
                    if read(server, len(piece)) != piece:
                        say("wrong bytes")
                    turns += 1
                    if turns % 10 == 0:
                        say("words", turns)
                    if choices.random() < 0.05:
                        child = os.fork()
                        if child == 0:
                            os._exit(0)
                        os.waitpid(child, 0)
        except ConnectionRefusedError:
            time.sleep(0.01)
        except (ConnectionResetError, BrokenPipeError):
            resets += 1
        except Exception as error:
            say("wrong", repr(error))
    say("resets", resets)
threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say("over")
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
