package policy

import (
	"crypto/rand"
	"encoding/binary"
	"strings"
	"time"

	"github.com/tetratelabs/wazero/api"
)

// WASI error numbers.
const (
	wasiOK     = 0
	wasiBadFD  = 8
	wasiInval  = 28
	wasiNoSys  = 52
	wasiTooBig = 1
)

const (
	// maxWrites bounds the buffers of one fd_write.
	maxWrites = 1024
	// writeStep and randomStep are the sizes of the parts for call.steps. Each byte of
	// output may end a line, and to log a line costs as much as to copy a hundred bytes.
	writeStep  = 256
	randomStep = 64 << 10
)

// wasiFunctions implement the part of WASI preview 1 that programs without files need:
// clocks, random numbers, and an output that is logged. There are no arguments,
// no environment and no files. wazero's own implementation has all of WASI, which is more
// than untrusted programs should have.
var wasiFunctions = append([]function{
	{"args_sizes_get", params(2), params(1), func(c *call, s []uint64) { s[0] = c.zeroes(s[0], s[1]) }},
	{"args_get", params(2), params(1), func(_ *call, s []uint64) { s[0] = wasiOK }},
	{"environ_sizes_get", params(2), params(1), func(c *call, s []uint64) { s[0] = c.zeroes(s[0], s[1]) }},
	{"environ_get", params(2), params(1), func(_ *call, s []uint64) { s[0] = wasiOK }},
	{"clock_res_get", params(2), params(1), func(c *call, s []uint64) {
		s[0] = c.clock(uint32(s[0]), s[1], func() uint64 { return 1 })
	}},
	{"clock_time_get", []api.ValueType{i32, i64, i32}, params(1), func(c *call, s []uint64) {
		monotonic := uint32(s[0]) != 0
		s[0] = c.clock(uint32(s[0]), s[2], func() uint64 {
			if monotonic {
				return uint64(time.Since(started))
			}
			return uint64(c.instance.policy.host.config.Now().UnixNano())
		})
	}},
	{"random_get", params(2), params(1), func(c *call, s []uint64) {
		c.steps(c.bytes(s[0], s[1]), randomStep, func(part []byte) { rand.Read(part) }) // does not fail
		s[0] = wasiOK
	}},
	{"fd_write", params(4), params(1), func(c *call, s []uint64) {
		c.tick()
		s[0] = c.fdWrite(uint32(s[0]), uint32(s[1]), uint32(s[2]), uint32(s[3]))
	}},
	{"fd_read", params(4), params(1), func(c *call, s []uint64) { // the input is empty
		if uint32(s[0]) != 0 {
			s[0] = wasiBadFD
			return
		}
		s[0] = c.zeroes(s[3])
	}},
	{"fd_fdstat_get", params(2), params(1), func(c *call, s []uint64) {
		if uint32(s[0]) > 2 {
			s[0] = wasiBadFD
			return
		}
		b := c.bytes(s[1], 24)
		clear(b)
		b[0] = 2 // a character device
		s[0] = wasiOK
	}},
	{"fd_fdstat_set_flags", params(2), params(1), func(_ *call, s []uint64) {
		if fd := uint32(s[0]); fd <= 2 {
			s[0] = wasiOK
			return
		}
		s[0] = wasiBadFD
	}},
	{"fd_prestat_get", params(2), params(1), badFD},
	{"fd_prestat_dir_name", params(3), params(1), badFD},
	{"poll_oneoff", params(4), params(1), func(c *call, s []uint64) {
		c.tick()
		s[0] = c.poll(uint32(s[0]), uint32(s[1]), uint32(s[2]), uint32(s[3]))
	}},
	{"proc_exit", params(1), nil, func(_ *call, s []uint64) { panic(&exited{uint32(s[0])}) }},
	{"sched_yield", nil, params(1), func(_ *call, s []uint64) { s[0] = wasiOK }},
}, unsupported()...)

// started is the zero of the monotonic clock.
var started = time.Now()

func badFD(_ *call, s []uint64) { s[0] = wasiBadFD }

// unsupported returns the functions on files and sockets. Programs may import them, but have
// no files or sockets.
func unsupported() []function {
	var list []function
	for _, group := range []struct {
		names  string
		params []api.ValueType
	}{
		{"fd_close fd_datasync fd_sync", params(1)},
		{"fd_filestat_get fd_renumber fd_tell sock_shutdown", params(2)},
		{"path_create_directory path_remove_directory path_unlink_file sock_accept", params(3)},
		{"path_filestat_get path_symlink sock_send", params(5)},
		{"path_readlink path_rename sock_recv", params(6)},
		{"path_link", params(7)},
		{"fd_filestat_set_size", []api.ValueType{i32, i64}},
		{"fd_allocate fd_fdstat_set_rights", []api.ValueType{i32, i64, i64}},
		{"fd_advise fd_filestat_set_times", []api.ValueType{i32, i64, i64, i32}},
		{"fd_seek", []api.ValueType{i32, i64, i32, i32}},
		{"fd_pread fd_pwrite fd_readdir", []api.ValueType{i32, i32, i32, i64, i32}},
		{"path_filestat_set_times", []api.ValueType{i32, i32, i32, i32, i64, i64, i32}},
		{"path_open", []api.ValueType{i32, i32, i32, i32, i32, i64, i64, i32, i32}},
	} {
		for name := range strings.FieldsSeq(group.names) {
			list = append(list, function{name, group.params, params(1), badFD})
		}
	}
	return append(list, function{"proc_raise", params(1), params(1), func(_ *call, s []uint64) { s[0] = wasiNoSys }})
}

// zeroes writes 0 to each address.
func (c *call) zeroes(addresses ...uint64) uint64 {
	for _, at := range addresses {
		clear(c.bytes(at, 4))
	}
	return wasiOK
}

func (c *call) clock(id uint32, out uint64, read func() uint64) uint64 {
	if id > 3 {
		return wasiInval
	}
	binary.LittleEndian.PutUint64(c.bytes(out, 8), read())
	return wasiOK
}

func (c *call) fdWrite(fd, list, count, out uint32) uint64 {
	switch {
	case fd != 1 && fd != 2:
		return wasiBadFD
	case count > maxWrites:
		return wasiTooBig
	}
	total := uint32(0)
	for i := range count {
		buffer := c.bytes(uint64(list+8*i), 8)
		at, n := binary.LittleEndian.Uint32(buffer), binary.LittleEndian.Uint32(buffer[4:])
		c.steps(c.bytes(uint64(at), uint64(n)), writeStep, func(part []byte) { c.instance.output.write(part, c.chain) })
		total += n
	}
	binary.LittleEndian.PutUint32(c.bytes(uint64(out), 4), total)
	return wasiOK
}

// poll reports that all clocks have expired: policies cannot sleep.
func (c *call) poll(in, out, count, events uint32) uint64 {
	if count == 0 || count > 64 {
		return wasiInval
	}
	input, output := c.bytes(uint64(in), uint64(count*48)), c.bytes(uint64(out), uint64(count*32))
	for i := range count {
		var event [32]byte
		copy(event[:8], input[48*i:])
		if event[10] = input[48*i+8]; event[10] != 0 { // not a clock: a file
			event[8] = wasiBadFD
		}
		copy(output[32*i:], event[:])
	}
	binary.LittleEndian.PutUint32(c.bytes(uint64(events), 4), count)
	return wasiOK
}
