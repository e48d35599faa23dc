// Package wire is the protocol between the node and its namespace helper: one
// packet per request and one per response, over a SOCK_SEQPACKET pair. An answer
// may carry one descriptor. Numbers are little-endian.
//
//	request  version u8, op u8, family u8, 0, seq u32, pid u32, len(id) u16, len(cgroup) u16, id, cgroup
//	answer   version u8, status u8, 0, 0, seq u32, errno u32, text
//
// The helper greets with an answer of seq 0. Both ends are of one build or
// refuse each other by Version.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Version is raised with every change of the layout or of an Op's meaning.
const Version = 3

// MaxPacket bounds a packet, both ways.
const MaxPacket = 4096

// Op is what the helper is asked to do.
type Op uint8

const (
	// OpSocket makes an unconnected TCP socket in the network namespace of the
	// process PID. The answer carries it.
	OpSocket Op = 1
	// OpForget drops what is kept for the sandbox ID.
	OpForget Op = 2
	// OpTUN makes the network device of package link in the network namespace of
	// the process PID. The answer carries its other end.
	OpTUN Op = 3
	// OpListener makes the listener of package link in the network namespace of the
	// process PID, which has its device. The answer carries it.
	OpListener Op = 4
)

// Family of a socket.
type Family uint8

const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Status of an answer.
type Status uint8

const (
	StatusOK Status = 0
	// StatusFailed: a system call failed, with Errno.
	StatusFailed Status = 1
	// StatusRefused: the request was against the rules, for the reason in Text.
	StatusRefused Status = 2
	// StatusForeign: the process is not in a user namespace below the helper's
	// own. If it is a sandbox nevertheless, Podman has made a new user
	// namespace, and a helper must be started there.
	StatusForeign Status = 3
)

// Request to the helper.
type Request struct {
	Op     Op
	Family Family // OpSocket
	Seq    uint32 // chosen by the node; never 0
	PID    uint32 // the first process of the sandbox; not for OpForget
	ID     string
	// Cgroup that the process has to be in or below, so that a number which
	// was used again for another process is noticed; empty: not checked.
	Cgroup string
}

// Answer of the helper.
type Answer struct {
	Status Status
	Seq    uint32
	Errno  uint32
	Text   string
}

var errMalformed = errors.New("malformed packet")

const header = 16

// AppendTo appends the packet to b.
func (r Request) AppendTo(b []byte) ([]byte, error) {
	if header+len(r.ID)+len(r.Cgroup) > MaxPacket {
		return nil, fmt.Errorf("a request of more than %d bytes", MaxPacket)
	}
	b = append(b, Version, byte(r.Op), byte(r.Family), 0)
	b = binary.LittleEndian.AppendUint32(b, r.Seq)
	b = binary.LittleEndian.AppendUint32(b, r.PID)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(r.ID)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(r.Cgroup)))
	b = append(b, r.ID...)
	return append(b, r.Cgroup...), nil
}

// ParseRequest is the reverse of Request.AppendTo.
func ParseRequest(b []byte) (Request, error) {
	if err := check(b, header); err != nil {
		return Request{}, err
	}
	id := int(binary.LittleEndian.Uint16(b[12:]))
	cgroup := int(binary.LittleEndian.Uint16(b[14:]))
	if len(b) != header+id+cgroup {
		return Request{}, errMalformed
	}
	return Request{
		Op:     Op(b[1]),
		Family: Family(b[2]),
		Seq:    binary.LittleEndian.Uint32(b[4:]),
		PID:    binary.LittleEndian.Uint32(b[8:]),
		ID:     string(b[header : header+id]),
		Cgroup: string(b[header+id:]),
	}, nil
}

const answerHeader = 12

// AppendTo appends the packet to b. Text that is too long is cut.
func (a Answer) AppendTo(b []byte) []byte {
	b = append(b, Version, byte(a.Status), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, a.Seq)
	b = binary.LittleEndian.AppendUint32(b, a.Errno)
	return append(b, a.Text[:min(len(a.Text), MaxPacket-answerHeader)]...)
}

// ParseAnswer is the reverse of Answer.AppendTo.
func ParseAnswer(b []byte) (Answer, error) {
	if err := check(b, answerHeader); err != nil {
		return Answer{}, err
	}
	return Answer{
		Status: Status(b[1]),
		Seq:    binary.LittleEndian.Uint32(b[4:]),
		Errno:  binary.LittleEndian.Uint32(b[8:]),
		Text:   string(b[answerHeader:]),
	}, nil
}

func check(b []byte, least int) error {
	if len(b) > 0 && b[0] != Version {
		return fmt.Errorf("the other end speaks version %d of the protocol, this one %d: they are of different builds", b[0], Version)
	}
	if len(b) < least {
		return errMalformed
	}
	return nil
}
