package helper

import "container/list"

// maxBoxes bounds the namespaces that are kept open, two descriptors each: well
// below the 1,024 descriptors that a process has by default. A sandbox beyond
// it costs some 30 µs more per connection, nothing else.
const maxBoxes = 256

type boxKey struct {
	id  string
	pid uint32
}

// cache keeps the boxes that were used last.
type cache struct {
	max   int
	order *list.List // of entry, the last used in front
	byKey map[boxKey]*list.Element
}

type entry struct {
	key boxKey
	box *box
}

func newCache(most int) *cache {
	return &cache{max: most, order: list.New(), byKey: make(map[boxKey]*list.Element)}
}

func (c *cache) get(key boxKey) *box {
	e := c.byKey[key]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(entry).box
}

// put adds a box under a key that the cache does not have.
func (c *cache) put(key boxKey, b *box) {
	c.byKey[key] = c.order.PushFront(entry{key, b})
	if c.order.Len() > c.max {
		c.remove(c.order.Back())
	}
}

// forget closes what is kept for a sandbox, of whatever process.
func (c *cache) forget(id string) {
	for e := c.order.Front(); e != nil; {
		next := e.Next()
		if e.Value.(entry).key.id == id {
			c.remove(e)
		}
		e = next
	}
}

func (c *cache) remove(e *list.Element) {
	gone := c.order.Remove(e).(entry)
	delete(c.byKey, gone.key)
	gone.box.close()
}
