package server

// screen keeps the last ringSize bytes that a terminal printed. Positions count all bytes
// that it ever printed. The zero value is ready. It is not safe for concurrent use.
type screen struct {
	circular
	parser escapes // at start
}

// print appends output of at most ringSize bytes and drops the oldest bytes.
func (s *screen) print(data []byte) {
	drop := s.grow(len(data), ringSize)
	for end := s.start + drop; s.start < end; {
		part := s.part(s.start, end)
		s.parser.skip(part)
		s.start += int64(len(part))
	}
	s.put(data)
}

// clean is the oldest position at which a terminal that has seen nothing before can begin:
// between runes and outside of escape sequences. It is the end if every position is unclean.
func (s *screen) clean() int64 {
	at, parser := s.start, s.parser
	for at < s.end && !parser.clean(s.part(at, at+1)[0]) {
		parser.skip(s.part(at, at+1))
		at++
	}
	return at
}

// escapes follows the escape sequences of ECMA-48, as xterm reads them, and the runes of
// UTF-8, in the output of a terminal.
type escapes uint8

const (
	escNone         escapes = iota
	escBegun                // after ESC
	escIntermediate         // after ESC and intermediate bytes; one final byte is left
	escCSI                  // in a control sequence; a byte from @ to ~ ends it
	escOSC                  // in an operating system command; BEL or ST ends it
	escString               // in DCS, SOS, PM or APC; ST ends it
	escOSCEnd               // after an ESC in escOSC
	escStringEnd            // after an ESC in escString
)

// clean reports whether the output may be cut before the byte b.
func (e escapes) clean(b byte) bool {
	return e == escNone && b&0xC0 != 0x80 // 10xxxxxx continues a rune
}

// skip reads output.
func (e *escapes) skip(output []byte) {
	state := *e
	for _, b := range output {
		if state == escNone && b != 0x1B {
			continue
		}
		state = state.next(b)
	}
	*e = state
}

// next returns the state after the byte b.
func (e escapes) next(b byte) escapes {
	switch b {
	case 0x18, 0x1A: // CAN and SUB end every sequence
		return escNone
	case 0x1B:
		switch e {
		case escOSC:
			return escOSCEnd
		case escString:
			return escStringEnd
		}
		return escBegun
	}
	switch e {
	case escOSCEnd, escStringEnd:
		if b == '\\' {
			return escNone
		}
		return escBegun.next(b) // the ESC ended the string and began a sequence
	case escBegun:
		switch {
		case b == '[':
			return escCSI
		case b == ']':
			return escOSC
		case b == 'P', b == 'X', b == '^', b == '_':
			return escString
		case b < 0x20:
			return e // a control character within the sequence
		case b < 0x30:
			return escIntermediate
		}
		return escNone
	case escIntermediate:
		if b < 0x30 {
			return e
		}
		return escNone
	case escCSI:
		if b < 0x40 {
			return e
		}
		return escNone
	case escOSC:
		if b == 0x07 {
			return escNone
		}
	}
	return e
}
