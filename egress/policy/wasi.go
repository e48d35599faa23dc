package policy

import (
	"crypto/rand"
	"encoding/binary"
	"time"

	"github.com/tetratelabs/wazero/api"
)

// WASI error numbers.
const (
	wasiOK     = 0
	wasiBadFD  = 8
	wasiFault  = 21
	wasiInval  = 28
	wasiNoSys  = 52
	wasiTooBig = 1
)

// maxWrites bounds the buffers of one fd_write.
const maxWrites = 1024

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
		c.steps(c.bytes(s[0], s[1]), func(part []byte) { rand.Read(part) }) // does not fail
		s[0] = wasiOK
	}},
	{"fd_write", params(4), params(1), func(c *call, s []uint64) {
		c.tick()
		s[0] = c.fdWrite(uint32(s[0]), uint32(s[1]), uint32(s[2]), uint32(s[3]))
	}},
	{"fd_read", params(4), params(1), func(c *call, s []uint64) { // the input is empty
		if uint32(s[0]) != 0 {
			s[0] = wasiBadFD
		} else if s[0] = wasiOK; !c.memory.WriteUint32Le(uint32(s[3]), 0) {
			s[0] = wasiFault
		}
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
		if uint32(s[0]) > 2 {
			s[0] = wasiBadFD
		} else {
			s[0] = wasiOK
		}
	}},
	{"fd_prestat_get", params(2), params(1), badFD},
	{"fd_prestat_dir_name", params(3), params(1), badFD},
	{"poll_oneoff", params(4), params(1), func(c *call, s []uint64) {
		c.tick()
		s[0] = c.poll(uint32(s[0]), uint32(s[1]), uint32(s[2]), uint32(s[3]))
	}},
	{"proc_exit", params(1), nil, func(_ *call, s []uint64) { panic(&exited{uint32(s[0])}) }},
	{"sched_yield", nil, params(1), func(_ *call, s []uint64) { s[0] = wasiOK }},
}, nothing()...)

// started is the zero of the monotonic clock.
var started = time.Now()

func badFD(_ *call, s []uint64) { s[0] = wasiBadFD }

// nothing returns the functions on files and sockets. Programs may import them, but have
// no files or sockets.
func nothing() []function {
	const l = i64
	var list []function
	for name, types := range map[string][]api.ValueType{
		"fd_advise":               {i32, l, l, i32},
		"fd_allocate":             {i32, l, l},
		"fd_close":                params(1),
		"fd_datasync":             params(1),
		"fd_fdstat_set_rights":    {i32, l, l},
		"fd_filestat_get":         params(2),
		"fd_filestat_set_size":    {i32, l},
		"fd_filestat_set_times":   {i32, l, l, i32},
		"fd_pread":                {i32, i32, i32, l, i32},
		"fd_pwrite":               {i32, i32, i32, l, i32},
		"fd_readdir":              {i32, i32, i32, l, i32},
		"fd_renumber":             params(2),
		"fd_seek":                 {i32, l, i32, i32},
		"fd_sync":                 params(1),
		"fd_tell":                 params(2),
		"path_create_directory":   params(3),
		"path_filestat_get":       params(5),
		"path_filestat_set_times": {i32, i32, i32, i32, l, l, i32},
		"path_link":               params(7),
		"path_open":               {i32, i32, i32, i32, i32, l, l, i32, i32},
		"path_readlink":           params(6),
		"path_remove_directory":   params(3),
		"path_rename":             params(6),
		"path_symlink":            params(5),
		"path_unlink_file":        params(3),
		"sock_accept":             params(3),
		"sock_recv":               params(6),
		"sock_send":               params(5),
		"sock_shutdown":           params(2),
	} {
		list = append(list, function{name, types, params(1), badFD})
	}
	return append(list, function{"proc_raise", params(1), params(1), func(_ *call, s []uint64) { s[0] = wasiNoSys }})
}

func (c *call) zeroes(a, b uint64) uint64 {
	if !c.memory.WriteUint32Le(uint32(a), 0) || !c.memory.WriteUint32Le(uint32(b), 0) {
		return wasiFault
	}
	return wasiOK
}

func (c *call) clock(id uint32, out uint64, read func() uint64) uint64 {
	switch {
	case id > 3:
		return wasiInval
	case !c.memory.WriteUint64Le(uint32(out), read()):
		return wasiFault
	}
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
		at, ok := c.memory.ReadUint32Le(list + 8*i)
		n, ok2 := c.memory.ReadUint32Le(list + 8*i + 4)
		if !ok || !ok2 {
			return wasiFault
		}
		b, ok := c.memory.Read(at, n)
		if !ok {
			return wasiFault
		}
		c.steps(b, func(part []byte) { c.instance.output.write(part, c.chain) })
		total += n
	}
	if !c.memory.WriteUint32Le(out, total) {
		return wasiFault
	}
	return wasiOK
}

// poll reports that all clocks have expired: policies cannot sleep.
func (c *call) poll(in, out, count, events uint32) uint64 {
	if count == 0 || count > 64 {
		return wasiInval
	}
	input, ok := c.memory.Read(in, count*48)
	output, ok2 := c.memory.Read(out, count*32)
	if !ok || !ok2 {
		return wasiFault
	}
	for i := range count {
		event := make([]byte, 32)
		copy(event, input[48*i:48*i+8])
		kind := input[48*i+8]
		if kind != 0 { // not a clock: a file
			binary.LittleEndian.PutUint16(event[8:], wasiBadFD)
		}
		event[10] = kind
		copy(output[32*i:], event)
	}
	if !c.memory.WriteUint32Le(events, count) {
		return wasiFault
	}
	return wasiOK
}
