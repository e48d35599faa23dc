package helper

import "container/list"

// maxNamespaces bounds the open namespaces, with two descriptors each: well below the 1,024
// descriptors that a process may have by default. With more sandboxes, a connection to one
// whose namespace is not open takes some 30 µs longer.
const maxNamespaces = 256

type namespaceKey struct {
	id  string
	pid uint32
}

// cache has the most recently used namespaces, and closes those that it evicts.
type cache struct {
	max   int
	order *list.List // of entry, the most recently used first
	byKey map[namespaceKey]*list.Element
}

type entry struct {
	key       namespaceKey
	namespace *namespace
}

func newCache(limit int) *cache {
	return &cache{max: limit, order: list.New(), byKey: make(map[namespaceKey]*list.Element)}
}

func (c *cache) get(key namespaceKey) *namespace {
	e := c.byKey[key]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(entry).namespace
}

// put adds a namespace under a new key. The cache owns it.
func (c *cache) put(key namespaceKey, n *namespace) {
	c.byKey[key] = c.order.PushFront(entry{key, n})
	if c.order.Len() > c.max {
		c.remove(c.order.Back())
	}
}

// forget closes the namespaces of a sandbox, for every pid.
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
	gone.namespace.close()
}
