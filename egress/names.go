package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store/document"
)

// namesKind is the kind of the documents that map addresses to the names that they stand
// for.
const namesKind = "names"

// writeNamesAfter is the delay that batches the writes of new names. A kill loses the
// names that are not written yet: a program that still uses such an address after the
// restart is refused, and looks the name up again.
const writeNamesAfter = time.Second

// writeNamesAgain is the delay before names are written again after an error: a full disk
// is not emptied in a second, and each attempt logs a line.
const writeNamesAgain = time.Minute

// nameBook preserves the addresses of names across a restart of the node: programs in
// sandboxes cache them for longer than a restart may take.
//
// A sandbox may have thousands of names. They are stored in pages, and only changed pages
// are written.
type nameBook struct {
	documents document.Store
	log       *slog.Logger

	writing sync.Mutex // held while pages are written, so that they stay in order; before mu

	mu    sync.Mutex
	pages map[page]map[netip.Addr]string
	dirty map[page]bool
	timer *time.Timer
	done  bool
}

// page is 256 addresses of a sandbox.
type page struct {
	id     sandbox.ID
	prefix netip.Prefix
}

// pageBits is the prefix length of a page. The names of a page take 64 KiB at most.
const pageBits = 24

func pageOf(id sandbox.ID, a netip.Addr) page {
	return page{id, netip.PrefixFrom(a, pageBits).Masked()}
}

func (p page) document() string { return string(p.id) + "/" + p.prefix.Addr().String() }

func parsePage(document string) (page, bool) {
	id, prefix, _ := strings.Cut(document, "/")
	a, err := netip.ParseAddr(prefix)
	return pageOf(sandbox.ID(id), a), err == nil && a.Is4()
}

func openNameBook(ctx context.Context, documents document.Store, log *slog.Logger) (*nameBook, error) {
	b := &nameBook{documents: documents, log: log, pages: map[page]map[netip.Addr]string{}, dirty: map[page]bool{}}
	err := documents.Documents(ctx, namesKind, func(document string, value []byte) error {
		p, ok := parsePage(document)
		var names map[netip.Addr]string
		if err := json.Unmarshal(value, &names); err != nil || !ok {
			// They are looked up again.
			log.Warn("ignoring unreadable names of sandbox", "document", document, "error", err)
			names = nil
		}
		if ok {
			b.pages[p] = names
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the names of sandboxes: %w", err)
	}
	b.timer = time.AfterFunc(time.Hour, b.flush) // set with the first name
	b.timer.Stop()
	return b, nil
}

// known returns a sandbox's recorded names by address.
func (b *nameBook) known(id sandbox.ID) map[netip.Addr]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := map[netip.Addr]string{}
	for p, names := range b.pages {
		if p.id == id {
			maps.Copy(known, names)
		}
	}
	return known
}

// sandboxes returns the sandboxes that have names.
func (b *nameBook) sandboxes() map[sandbox.ID]struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[sandbox.ID]struct{}{}
	for p := range b.pages {
		all[p.id] = struct{}{}
	}
	return all
}

// record records that an address stands for a name from now on, or for none. A removal is
// written with the next names: the address is not reused for hours, see package dns.
func (b *nameBook) record(id sandbox.ID, name string, a netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := pageOf(id, a)
	if b.pages[p] == nil {
		b.pages[p] = map[netip.Addr]string{}
	}
	b.pages[p][a] = name
	if name == "" {
		delete(b.pages[p], a)
	}
	b.change(p, writeNamesAfter)
}

// change schedules the write of a page: after the given delay, or with the pages that are
// already scheduled. The caller holds b.mu.
func (b *nameBook) change(p page, after time.Duration) {
	if b.done {
		return
	}
	if len(b.dirty) == 0 {
		b.timer.Reset(after)
	}
	b.dirty[p] = true
}

// forget deletes a sandbox's names.
func (b *nameBook) forget(ctx context.Context, id sandbox.ID) error {
	b.writing.Lock() // or a page that is being written would remain
	defer b.writing.Unlock()
	b.mu.Lock()
	var deleted []page
	for p := range b.pages {
		if p.id == id {
			deleted = append(deleted, p)
			delete(b.pages, p)
			delete(b.dirty, p)
		}
	}
	b.mu.Unlock()
	var errs []error
	for _, p := range deleted {
		errs = append(errs, b.documents.DeleteDocument(ctx, namesKind, p.document()))
	}
	return errors.Join(errs...)
}

// flush writes the changed pages. A page that cannot be written is scheduled again.
func (b *nameBook) flush() {
	b.writing.Lock()
	defer b.writing.Unlock()
	for p, value := range b.encodeDirty() {
		if err := b.documents.PutDocument(context.Background(), namesKind, p.document(), value); err != nil {
			b.log.Warn("failed to store names of sandbox", "sandbox", p.id, "error", err)
			b.mu.Lock()
			b.change(p, writeNamesAgain)
			b.mu.Unlock()
		}
	}
}

// encodeDirty returns the encoded changed pages, and clears the set of changed pages.
func (b *nameBook) encodeDirty() map[page][]byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	values := map[page][]byte{}
	for p := range b.dirty {
		if value, err := json.Marshal(b.pages[p]); err == nil { // cannot fail: addresses and strings
			values[p] = value
		}
	}
	clear(b.dirty)
	return values
}

// close writes the changed pages. Later changes are not written.
func (b *nameBook) close() {
	b.mu.Lock()
	b.done = true
	b.mu.Unlock()
	b.timer.Stop()
	b.flush()
}
