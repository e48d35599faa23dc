// Package wire is the protocol between the node and its namespace helper: one
// packet per request and one per response, over a SOCK_SEQPACKET pair. A response
// may carry one descriptor. Numbers are little-endian.
//
//	request   version u8, op u8, 0, 0, seq u32, pid u32, len(id) u16, len(cgroup) u16, id, cgroup
//	response  version u8, status u8, 0, 0, seq u32, errno u32, text
//
// The helper first sends a greeting, which is a response with seq 0. Both ends refuse
// packets of another Version.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
)

// Version is incremented with every change of the layout or of an Op's meaning.
const Version = 4

// MaxPacket bounds a packet, in bytes, in both directions.
const MaxPacket = 4096

// Op is an operation of the helper.
type Op uint8

const (
	// OpSocket creates an unconnected TCP socket, for IPv4, in the network namespace of
	// the process PID. The response carries it.
	OpSocket Op = 1
	// OpForget closes the helper's open namespaces of the sandbox ID.
	OpForget Op = 2
	// OpTUN creates the network device of package link in the network namespace of
	// the process PID. The response carries its other end.
	OpTUN Op = 3
	// OpListener creates the listener of package link in the network namespace of the
	// process PID, which must have its device. The response carries it.
	OpListener Op = 4
	// OpSocket6 is OpSocket for IPv6.
	OpSocket6 Op = 5
)

// Status of a response.
type Status uint8

const (
	StatusOK Status = 0
	// StatusFailed: a system call failed, with Errno.
	StatusFailed Status = 1
	// StatusRefused: the request is not permitted, for the reason in Text.
	StatusRefused Status = 2
	// StatusForeign: the process is not in a user namespace below the helper's
	// own. If it is a sandbox's process nevertheless, Podman has created a new user
	// namespace, and a helper must be started there.
	StatusForeign Status = 3
)

// Request to the helper.
type Request struct {
	Op  Op
	Seq uint32 // chosen by the node
	PID uint32 // the first process of the sandbox; not for OpForget
	ID  string
	// Cgroup that the process must be in or below, so that a reused pid is detected.
	// If it is empty, the cgroup is not checked.
	Cgroup string
}

// Response of the helper. It is an error unless its Status is StatusOK. The error wraps Errno,
// if that is set.
type Response struct {
	Status Status
	Seq    uint32
	Errno  syscall.Errno // of the failed system call; 0 if none failed
	Text   string
}

func (r Response) Error() string { return "namespace helper: " + r.Text }

func (r Response) Unwrap() error {
	if r.Errno == 0 {
		return nil
	}
	return r.Errno
}

var errMalformed = errors.New("malformed packet")

const header = 16

// AppendTo appends the packet to b. It fails if the packet would exceed MaxPacket.
func (r Request) AppendTo(b []byte) ([]byte, error) {
	if header+len(r.ID)+len(r.Cgroup) > MaxPacket {
		return nil, fmt.Errorf("request exceeds %d bytes", MaxPacket)
	}
	b = append(b, Version, byte(r.Op), 0, 0)
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
		Seq:    binary.LittleEndian.Uint32(b[4:]),
		PID:    binary.LittleEndian.Uint32(b[8:]),
		ID:     string(b[header : header+id]),
		Cgroup: string(b[header+id:]),
	}, nil
}

const responseHeader = 12

// AppendTo appends the packet to b. Text that is too long is truncated.
func (r Response) AppendTo(b []byte) []byte {
	b = append(b, Version, byte(r.Status), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, r.Seq)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.Errno))
	return append(b, r.Text[:min(len(r.Text), MaxPacket-responseHeader)]...)
}

// ParseResponse is the reverse of Response.AppendTo.
func ParseResponse(b []byte) (Response, error) {
	if err := check(b, responseHeader); err != nil {
		return Response{}, err
	}
	return Response{
		Status: Status(b[1]),
		Seq:    binary.LittleEndian.Uint32(b[4:]),
		Errno:  syscall.Errno(binary.LittleEndian.Uint32(b[8:])),
		Text:   string(b[responseHeader:]),
	}, nil
}

func check(b []byte, minimum int) error {
	if len(b) > 0 && b[0] != Version {
		return fmt.Errorf("the other end uses version %d of the protocol and this one version %d: they are of different builds", b[0], Version)
	}
	if len(b) < minimum {
		return errMalformed
	}
	return nil
}
