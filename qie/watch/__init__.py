"""`qie watch`: pages that show what is going on in folders, from the files that are there, and change while one looks.

A `LivePage` (`live_page.py`) is a name and four functions, and the server (`server.py`) knows nothing else of it:

* `read()` gives the facts as a dict of JSON values: a reader of files, such as `run_reader.RunReader.read`. It is
  called at most once a second, whoever looks, and never by two threads at once. It keeps what it has read: the next
  call only reads what is new. A file that is missing, cut short or another program's is a fact, not an error.
* `render(facts)` gives the page's parts by their names, in their order: `qie.html_report.markup.Html`, made by `tag`,
  which escapes whatever a file says. The browser replaces the parts that changed. Buttons are made by
  `controls.button(label, action, **values)`, pictures are `<img src="picture/NAME">`.
* `picture(name)` gives the bytes and the media type of such a picture; None: there is none.
* `act(action, values)` does what a button asks for, and says what it did in one line. It raises QieError to refuse.

To add a page: write a reader and a renderer, and give `qie.watch.places.open_pages` the places that it is for.
"""
