package policy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/store/document"
)

// valuesKind is the kind of the documents that hold the stored values of policies.
const valuesKind = "policyvalues"

const (
	// pages is the number of pages of a space. Only changed pages are written.
	pages = 16
	// maxPage bounds the size of a page, and is below the limit of a document. A page
	// exceeds it only if most keys of a full space were chosen to be on the same page;
	// such a page is not stored.
	maxPage = 700 << 10
	// writeAfter is the delay that batches changes, and writeRate the number of bytes
	// per second that are written of a space: a policy that fills its 1 MiB again and
	// again writes 1.4 GB a day.
	writeAfter = time.Second
	writeRate  = 16 << 10
	// writeAgain is the delay before a failed write is repeated.
	writeAgain = time.Minute
)

// persistence writes changed spaces to documents, asynchronously.
type persistence struct {
	documents document.Store // nil: nothing is written
	log       *slog.Logger
	writing   sync.Mutex // held while documents are written or deleted; locked before mu of kv and of spaces
	// changed receives a value when a space without unwritten changes changes.
	changed chan struct{}
}

// pageOf returns the page of a key.
func pageOf(key string) int {
	h := fnv.New32a()
	h.Write([]byte(key))
	return int(h.Sum32() % pages)
}

// documentName returns the name of the document of a page. space is a name that spaceName
// returned.
func documentName(space string, page int) string {
	policy, namespace, _ := strings.Cut(space, "\x00")
	return fmt.Sprintf("%s/%x/%s", policy, page, namespace)
}

func parseDocument(name string) (space string, ok bool) {
	policy, rest, _ := strings.Cut(name, "/")
	_, namespace, ok := strings.Cut(rest, "/")
	return spaceName(policy, namespace), ok
}

// load reads the stored values. Unreadable documents are logged, and not deleted.
func (k *kv) load(ctx context.Context, now time.Time) error {
	if k.documents == nil {
		return nil
	}
	err := k.documents.Documents(ctx, valuesKind, func(name string, value []byte) error {
		space, ok := parseDocument(name)
		entries, err := decodeEntries(value)
		if !ok || err != nil {
			k.log.Error("ignoring unreadable values of a policy", "document", name, "error", err)
			return nil
		}
		s := k.space(space, now)
		if s == nil {
			k.log.Error("ignoring values of a policy: too many policies have some", "document", name)
			return nil
		}
		s.stored = true
		for key, e := range entries {
			if e.expired(now) {
				s.mark(1 << pageOf(key)) // removes it from the document
				continue
			}
			s.entries[key] = e
			s.grow(len(key) + len(e.value))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the values of policies: %w", err)
	}
	return nil
}

// writer calls write when changes are due, until stop is closed. While nothing changes, it
// does not wake.
func (k *kv) writer(stop <-chan struct{}, write func(ctx context.Context, now time.Time, all bool) error) {
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	var at time.Time // when the timer fires; zero: never
	for {
		select {
		case <-stop:
			return
		case <-k.changed:
			if due := time.Now().Add(writeAfter); at.IsZero() || due.Before(at) {
				at = due
				timer.Reset(writeAfter)
			}
		case now := <-timer.C:
			if err := write(context.Background(), now, false); err != nil {
				k.log.Error("failed to store values of policies", "error", err)
			}
			if at = k.nextDue(now); !at.IsZero() {
				timer.Reset(time.Until(at))
			}
		}
	}
}

// nextDue returns the time at which the next changes are to be written, at least
// writeAfter from now, or zero if there are none.
func (k *kv) nextDue(now time.Time) (next time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	earliest := now.Add(writeAfter)
	for _, s := range k.spaces {
		s.mu.Lock()
		due := s.due
		if due.Before(earliest) {
			due = earliest
		}
		if s.changed != 0 && (next.IsZero() || due.Before(next)) {
			next = due
		}
		s.mu.Unlock()
	}
	return next
}

// write writes the changed pages that are due, or all changed pages if all is true. It
// returns the first error. Failed pages are due again after writeAgain.
func (k *kv) write(ctx context.Context, now time.Time, all bool) (first error) {
	if k.documents == nil {
		return nil
	}
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	spaces := maps.Clone(k.spaces)
	k.mu.Unlock()
	for name, s := range spaces {
		for page, content := range s.changes(now, all) {
			var err error
			switch {
			case len(content) > maxPage:
				err = fmt.Errorf("a page of policy values has %d bytes; at most %d fit", len(content), maxPage)
			case content == nil:
				err = k.documents.DeleteDocument(ctx, valuesKind, documentName(name, page))
			default:
				err = k.documents.PutDocument(ctx, valuesKind, documentName(name, page), content)
			}
			if err != nil {
				s.again(page, now)
				if first == nil {
					first = fmt.Errorf("%q: %w", documentName(name, page), err)
				}
			}
		}
	}
	return first
}

// changes returns the contents of the changed pages, if they are due or all is true. The
// content of an empty page is nil. The pages count as written.
func (s *space) changes(now time.Time, all bool) map[int][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone || s.changed == 0 || !all && now.Before(s.due) {
		return nil
	}
	contents := map[int][]byte{}
	for page := range pages {
		if s.changed&(1<<page) != 0 {
			contents[page] = nil
		}
	}
	for key, e := range s.entries {
		page := pageOf(key)
		if content, ok := contents[page]; ok && !e.expired(now) {
			contents[page] = appendEntry(content, key, e)
		}
	}
	written := 0
	for _, content := range contents {
		written += len(content)
	}
	s.changed, s.stored = 0, true
	s.due = now.Add(max(writeAfter, time.Duration(written)*time.Second/writeRate))
	return contents
}

// again schedules another write of a page whose write failed.
func (s *space) again(page int, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed |= 1 << page // the writer finds it after write
	s.due = now.Add(writeAgain)
}

// erase removes a space and its documents. If it returns an error, the space is unchanged,
// and its pages are scheduled to be written again.
func (k *kv) erase(ctx context.Context, name string) error {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	s := k.spaces[name]
	k.mu.Unlock()
	if s == nil {
		return nil
	}
	s.mu.Lock()
	stored := s.stored
	s.mu.Unlock()
	if k.documents != nil && stored {
		for page := range pages {
			if err := k.documents.DeleteDocument(ctx, valuesKind, documentName(name, page)); err != nil {
				s.mu.Lock()
				s.mark(1<<pages - 1)
				s.mu.Unlock()
				return fmt.Errorf("delete the values of a policy: %w", err)
			}
		}
	}
	k.forget(name)
	return nil
}

// entriesVersion is the first byte of a page.
const entriesVersion = 1

// appendEntry appends a key, a value and its expiry in Unix milliseconds, 0 for none.
func appendEntry(b []byte, key string, e entry) []byte {
	if len(b) == 0 {
		b = append(b, entriesVersion)
	}
	b = binary.AppendUvarint(b, uint64(len(key)))
	b = append(b, key...)
	b = binary.AppendUvarint(b, uint64(len(e.value)))
	b = append(b, e.value...)
	expires := int64(0)
	if !e.expires.IsZero() {
		expires = e.expires.UnixMilli()
	}
	return binary.AppendVarint(b, expires)
}

var errEntries = errors.New("it is not a page of values")

func decodeEntries(b []byte) (map[string]entry, error) {
	if len(b) == 0 || b[0] != entriesVersion {
		return nil, errEntries
	}
	b = b[1:]
	text := func(limit uint64) ([]byte, bool) {
		n, used := binary.Uvarint(b)
		if used <= 0 || n > limit || n > uint64(len(b)-used) {
			return nil, false
		}
		t := b[used : used+int(n)]
		b = b[used+int(n):]
		return t, true
	}
	entries := map[string]entry{}
	for len(b) > 0 {
		key, ok := text(maxKey)
		if !ok || len(key) == 0 || len(entries) == maxKeys {
			return nil, errEntries
		}
		value, ok := text(maxValue)
		if !ok {
			return nil, errEntries
		}
		expires, used := binary.Varint(b)
		if used <= 0 {
			return nil, errEntries
		}
		b = b[used:]
		e := entry{value: slices.Clone(value)}
		if expires != 0 {
			e.expires = time.UnixMilli(expires)
		}
		entries[string(key)] = e
	}
	return entries, nil
}
