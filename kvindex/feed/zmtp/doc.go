// Package zmtp is the client side of ZMTP 3 (the protocol of ZeroMQ sockets)
// that event feeds need: a SUB that connects or is connected to, and a DEALER
// that asks for a replay. Mechanism NULL, over tcp and Unix sockets (ipc).
//
// Frames are decoded where they lie in the read buffer: a Message refers to it
// and is valid until the next Recv. The buffer starts small and grows with what
// the peer sends, so that a thousand quiet connections cost little.
//
// A Conn is one connection and never reconnects by itself: a broken connection
// is a fact that the reader of a sequenced stream has to know.
//
// Wire format: https://rfc.zeromq.org/spec/23 (3.0) and /37 (3.1).
package zmtp
