# Serves one connection at a port that it prints, or is its client: perl echo.pl serve | call PORT
use strict;
use warnings;
use IO::Socket::INET;

use constant { HOST => '127.0.0.1', ROUND_TRIPS => 10000 };
STDOUT->autoflush(1);

if ($ARGV[0] eq 'serve') {
    my $listener = IO::Socket::INET->new(Listen => 1, LocalAddr => HOST, LocalPort => 0) or die "listen: $!\n";
    print $listener->sockport, "\n";
    my $connection = $listener->accept or die "accept: $!\n";
    while (sysread($connection, my $bytes, 16)) { syswrite($connection, $bytes) or die "send: $!\n" }
} else {
    my $connection = IO::Socket::INET->new(PeerAddr => HOST, PeerPort => $ARGV[1]) or die "connect: $!\n";
    for my $round (1 .. ROUND_TRIPS) {
        my $message = sprintf '%08d', $round;
        syswrite($connection, $message) == 8 or die "send: $!\n";
        my $answer = '';
        while (length $answer < 8) { sysread($connection, $answer, 8, length $answer) or die "receive: $!\n" }
        $answer eq $message or die "got '$answer' in place of '$message'\n";
    }
    print "answered\n";
    <STDIN>; # the connection stays until the end of the input
}
