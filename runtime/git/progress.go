package git

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxLine limits a line of git's messages. The remainder of a longer one is dropped.
	maxLine = 4 << 10
	// maxMessages limits the messages that are stored: the last ones.
	maxMessages = 16 << 10
)

// Phase is a phase of a transfer or checkout, in git's words.
type Phase string

const (
	PhaseEnumerating Phase = "enumerating_objects"
	PhaseCounting    Phase = "counting_objects"
	PhaseCompressing Phase = "compressing_objects"
	PhaseReceiving   Phase = "receiving_objects"
	PhaseWriting     Phase = "writing_objects"
	PhaseUnpacking   Phase = "unpacking_objects"
	PhaseResolving   Phase = "resolving_deltas"
	PhaseUpdating    Phase = "updating_files"
	PhaseFiltering   Phase = "filtering_content"
)

// phases by the titles of git's progress lines.
var phases = map[string]Phase{
	"Enumerating objects": PhaseEnumerating,
	"Counting objects":    PhaseCounting,
	"Compressing objects": PhaseCompressing,
	"Receiving objects":   PhaseReceiving,
	"Writing objects":     PhaseWriting,
	"Unpacking objects":   PhaseUnpacking,
	"Resolving deltas":    PhaseResolving,
	"Updating files":      PhaseUpdating,
	"Checking out files":  PhaseUpdating,
	"Filtering content":   PhaseFiltering,
}

// Progress of one phase.
type Progress struct {
	Phase Phase
	// Done of Total objects or files; Total is 0 while it is unknown.
	Done, Total int64
	Bytes       int64 // received or written, of the phases that transfer
	// Path of the submodule, relative to the repository; empty for the repository itself.
	Submodule string
}

// parseProgress parses a line such as
//
//	remote: Counting objects: 100% (5/5), done.
//	Receiving objects:  45% (450/1000), 1.20 MiB | 2.30 MiB/s
//	Enumerating objects: 5, done.
func parseProgress(line string) (p Progress, ok bool) {
	title, value, ok := strings.Cut(strings.TrimPrefix(line, "remote: "), ":")
	if p.Phase = phases[title]; !ok || p.Phase == "" {
		return p, false
	}
	count, more, _ := strings.Cut(strings.TrimSpace(value), ",")
	if percent, ratio, counted := strings.Cut(count, "% ("); counted {
		done, total, both := strings.Cut(strings.TrimSuffix(ratio, ")"), "/")
		if _, valid := parseCount(percent); !valid || !both {
			return p, false
		}
		if p.Total, ok = parseCount(total); !ok {
			return p, false
		}
		count = done
	}
	if p.Done, ok = parseCount(count); !ok || p.Total > 0 && p.Done > p.Total {
		return p, false
	}
	size, _, _ := strings.Cut(strings.TrimSpace(more), " |")
	size, _, _ = strings.Cut(size, ",")
	p.Bytes = parseSize(size)
	return p, true
}

// parseCount parses a number of objects.
func parseCount(s string) (int64, bool) {
	n, err := strconv.ParseUint(s, 10, 48)
	return int64(n), err == nil
}

// sizeUnits of git's sizes.
var sizeUnits = map[string]float64{"bytes": 1, "byte": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

// parseSize parses a size such as "1.20 MiB"; other text is 0.
func parseSize(s string) int64 {
	number, unit, _ := strings.Cut(s, " ")
	n, err := strconv.ParseFloat(number, 64)
	if factor := sizeUnits[unit]; err == nil && n >= 0 && n < 1<<20 {
		return int64(n * factor)
	}
	return 0
}

// messages splits git's stderr into lines. It reports progress, and stores the last of
// the other lines.
type messages struct {
	report    func(Progress)
	line      []byte
	text      []string
	size      int
	submodule string
}

func (m *messages) add(data []byte) {
	for len(data) > 0 {
		end := bytes.IndexAny(data, "\r\n")
		part := data
		if end >= 0 {
			part = data[:end]
		}
		m.line = append(m.line, part[:min(len(part), maxLine-len(m.line))]...)
		if end < 0 {
			return
		}
		m.flush()
		data = data[end+1:]
	}
}

// flush ends a line.
func (m *messages) flush() {
	line := strings.TrimSpace(clean(string(m.line)))
	m.line = m.line[:0]
	if line == "" {
		return
	}
	if p, ok := parseProgress(line); ok {
		if p.Submodule = m.submodule; m.report != nil {
			m.report(p)
		}
		return
	}
	if path, ok := strings.CutPrefix(line, "Cloning into '"); ok {
		m.submodule = strings.TrimSuffix(path, "'...")
	}
	m.text, m.size = append(m.text, line), m.size+len(line)
	drop := 0
	for ; m.size > maxMessages; drop++ {
		m.size -= len(m.text[drop])
	}
	m.text = slices.Delete(m.text, 0, drop)
}

// clean replaces what is not printable in text that a sandbox wrote.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}
