// Package zmtp is a client of ZMTP 3 (the protocol of ZeroMQ sockets) with what event feeds need: a SUB socket that
// connects or listens, and a DEALER socket that requests a replay. It supports the NULL mechanism, over tcp and Unix
// sockets (ipc).
//
// Frames are decoded in place in the read buffer: a Message refers to it and is valid until the next Recv. The buffer
// starts small and grows with what the peer sends, so that a thousand quiet connections cost little.
//
// A Conn is one connection and never reconnects by itself, because the reader of a sequenced
// stream has to know that a connection broke.
//
// Wire format: https://rfc.zeromq.org/spec/23 (3.0) and /37 (3.1).
package zmtp
